# SPDX-License-Identifier: Apache-2.0
"""vLLM offline, with pruning: a batch of pictures with questions, at several budgets.

    python examples/offline.py                          # a small trained model, on a CPU
    python examples/offline.py --model llava-hf/llava-1.5-7b-hf --budgets 100%,128,64 \\
        --ask bus.jpg "What number is the bus?" --ask sign.jpg "What does the sign say?"
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE
from anchorprune_vllm.commands.options import budgets, json_object
from anchorprune_vllm.testing.demo_models.make import find_text_encoder, make_trained_model


def main() -> None:
    args = read_arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the table is enough
    asked = args.asked or drawn_questions()
    settings: dict[str, Any] = {"budget": args.budgets[-1]}
    options: dict[str, Any] = {}
    model = args.model
    if model is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made here
        model = ".demo/trained-llava-1.5"
        make_trained_model(Path(model), "llava-1.5")
        # Beside the model. For published models the plugin knows the text encoder.
        settings["text_encoder"] = str(find_text_encoder(Path(model)))
        # The patches of its CLIP are most similar to the words that are true of them. Published
        # CLIPs are the other way round, and need no setting.
        settings["similarity"] = "raw"
        options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**27}

    from vllm import LLM, SamplingParams

    llm = LLM(model, hf_overrides={"anchorprune": settings}, **{**options, **args.engine_args})
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": picture},
                    {"type": "text", "text": question},
                ],
            }
        ]
        for picture, question in asked
    ]
    sampling = SamplingParams(temperature=0, max_tokens=32)
    columns = []
    for budget in args.budgets:
        outputs = llm.chat(
            conversations,
            sampling,
            use_tqdm=False,
            # Of these requests; without it, the budget that the engine was started with.
            mm_processor_kwargs={"anchorprune": {"budget": budget}},
        )
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        columns.append([*(output.outputs[0].text.strip() for output in outputs), str(tokens)])
    table = Table("question", *(f"budget {budget}" for budget in args.budgets))
    for cells in zip([*(text for _, text in asked), "prompt tokens, all"], *columns, strict=True):
        table.add_row(*cells)
    Console().print(table)


def drawn_questions() -> list[tuple[Image.Image, str]]:
    """Return cluttered scenes, and a question about one of the things in each."""
    asked = []
    for number in range(6):
        drawn = cluttered_scene(FIRST_TEST_SCENE + number)
        open_questions = [each.text for each in drawn.questions if each.kind != "yes/no"]
        asked.append((drawn.load(), open_questions[number % len(open_questions)]))
    return asked


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ask about pictures with vLLM's offline engine, at several budgets of visual "
        "tokens. Without arguments: drawn pictures and a small trained model, on a CPU.",
        epilog='Example: --model llava-hf/llava-1.5-7b-hf --budgets 100%,64 --ask bus.jpg "What '
        'number is the bus?"',
    )
    parser.add_argument(
        "--model", help="hub id or path (default: a small one, made in .demo/trained-llava-1.5)"
    )
    parser.add_argument(
        "--ask",
        nargs=2,
        action="append",
        default=[],
        metavar=("IMAGE", "QUESTION"),
        help="a picture file and a question about it; may be given again",
    )
    parser.add_argument(
        "--budgets",
        type=budgets,
        default=budgets("100%,64,16"),
        metavar="K,K,...",
        help="visual tokens kept per picture: numbers or shares; 100%% is unpruned (default: "
        "100%%,64,16)",
    )
    parser.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='further arguments of vllm.LLM, such as {"tensor_parallel_size": 2}',
    )
    args = parser.parse_args()
    try:
        args.asked = [(Image.open(path).convert("RGB"), question) for path, question in args.ask]
    except (OSError, Image.DecompressionBombError) as error:
        parser.error(f"{error}: give --ask a picture that Pillow can read")
    if args.model is not None and not args.ask:
        parser.error("a model of your own wants pictures of your own: give --ask IMAGE QUESTION")
    return args


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
