# SPDX-License-Identifier: Apache-2.0
"""One video, one question: with all visual tokens, and with a budget of them.

    python examples/video.py                            # a tiny LLaVA-Video, on a CPU
    python examples/video.py --model lmms-lab/LLaVA-Video-7B-Qwen2 --budgets 100%,512 \\
        clip.mp4 "What does the man pick up?"
    python examples/video.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames 64 clip.mp4 "Who wins?"
"""

from __future__ import annotations

import argparse
import base64
import os
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.options import budgets, json_object, positive
from anchorprune_vllm.testing.demo_models.make import find_text_encoder, make_demo_model
from anchorprune_vllm.testing.media import draw_clip


def main() -> None:
    args = read_arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the lines below are enough
    settings: dict[str, Any] = {"budget": args.budgets[-1]}
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 1}}
    model = args.model
    if model is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made here
        model = ".demo/llava-video"
        make_demo_model(Path(model), arch="llava-video")
        # Beside the model. For published models the plugin knows the text encoder.
        settings["text_encoder"] = str(find_text_encoder(Path(model)))
        options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**27}
        options |= {"max_model_len": 4096}
        print("A tiny model with random weights: its answers mean nothing.")
    if args.frames is not None:
        options["media_io_kwargs"] = {"video": {"num_frames": args.frames}}

    from vllm import LLM, SamplingParams

    llm = LLM(model, hf_overrides={"anchorprune": settings}, **{**options, **args.engine_args})
    url = draw_clip(seed=0).url if args.video is None else as_data_url(args.video)
    content = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": args.question},
    ]
    sampling = SamplingParams(temperature=0, max_tokens=32)
    for budget in args.budgets:
        (output,) = llm.chat(
            [{"role": "user", "content": content}],
            sampling,
            use_tqdm=False,
            # Of this request; without it, the budget that the engine was started with.
            mm_processor_kwargs={"anchorprune": {"budget": budget}},
        )
        print(f"budget {budget}: {len(output.prompt_token_ids)} prompt tokens")
        print(f"  {output.outputs[0].text.strip()}")


def as_data_url(video: Path) -> str:
    """A file as clients send it. (A server may also be allowed to read files or URLs itself.)"""
    return f"data:video/mp4;base64,{base64.b64encode(video.read_bytes()).decode()}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ask about a video with vLLM's offline engine, at several budgets of "
        "visual tokens. Without arguments: a drawn clip and a tiny LLaVA-Video, on a CPU.",
        epilog='Example: --model lmms-lab/LLaVA-Video-7B-Qwen2 --budgets 100%,512 clip.mp4 "What '
        'does the man pick up?"',
    )
    parser.add_argument("video", nargs="?", type=Path, help="a file (default: a drawn clip)")
    parser.add_argument("question", nargs="?", default="What happens in the video?")
    parser.add_argument(
        "--model",
        help="hub id or path (default: a tiny LLaVA-Video, made in .demo/llava-video)",
    )
    parser.add_argument(
        "--budgets",
        type=budgets,
        default=budgets("100%,64"),
        metavar="K,K,...",
        help="visual tokens kept of the video: numbers or shares; 100%% is unpruned (default: "
        "100%%,64)",
    )
    parser.add_argument(
        "--frames",
        type=positive,
        metavar="N",
        help="of the video that are looked at (default: vLLM's, which is 32)",
    )
    parser.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='further arguments of vllm.LLM, such as {"tensor_parallel_size": 2}',
    )
    args = parser.parse_args()
    if args.video is not None and not args.video.is_file():
        parser.error(f"there is no file {args.video}: give a video")
    return args


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
