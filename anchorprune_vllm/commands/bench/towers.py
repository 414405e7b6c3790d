# SPDX-License-Identifier: Apache-2.0
"""Time and memory of vision towers with and without pruning, in vLLM's own classes.

The models have random weights and a part of the real one's width and layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from transformers import AutoConfig, AutoModel

from anchorprune_vllm.commands.bench.measure import peak_bytes, table, this_device, time_in_turns
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.signals.attention import received_attention
from anchorprune_vllm.testing.demo_models.make import find_text_encoder, make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, one_rank

Configs = Mapping[str, Mapping[str, Any]]
"""Names of config files, and the entries to change in each."""

# The towers have an eighth of the real ones' heads, of the same size, and a part of their blocks.
# Only one block with full attention gives importance, however many the real tower has.
_QWEN_2_5: dict[str, Any] = {"hidden_size": 160, "num_heads": 2, "intermediate_size": 428}
_QWEN_2_5 |= {"depth": 8, "fullatt_block_indexes": [7]}  # 7 of 28 with windows, 1 of 4 with none
_QWEN_3 = {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 3}  # of 27
SMALL_TOWERS = {"qwen2.5-vl": (_QWEN_2_5, 4), "qwen3-vl": (_QWEN_3, 9)}
"""Config of each tower, and how many times as many blocks the real one has."""
_SIDES = (32, 64, 128)  # of images, in tokens

_NEXT_WIDTHS = (1024, 4096)  # vision tower and language model, as in the 7B model
_NEXT_PROMPT = "USER: <image>\nWhat is in the image? ASSISTANT:"

# As many patches as in the real LLaVA-Video (27 x 27), a quarter of its width and layers.
_VIDEO_TOWER = {"hidden_size": 288, "intermediate_size": 1076}
_VIDEO_TOWER |= {"num_attention_heads": 4, "num_hidden_layers": 7}
_VIDEO_TEXT = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
_VIDEO_TEXT |= {"mm_hidden_size": 288, "max_position_embeddings": 32768}
_VIDEO_CONFIGS: Configs = {
    "config.json": {"vision_config": _VIDEO_TOWER, **_VIDEO_TEXT},
    "siglip/config.json": {"vision_config": _VIDEO_TOWER, "text_config": {"projection_size": 288}},
}
_FRAMES = (16, 64)
_EMBEDDING_COLUMNS = ("budget", "tokens", "time", "of unpruned", "peak", "of unpruned")
_VIDEO_PROMPT = "<|im_start|>user\n<video>\nWhat is shown?<|im_end|>\n<|im_start|>assistant\n"


def received_attention_table() -> Table:
    """Compare towers with and without importance, which is read from their attention."""
    rows = []
    for arch, (config, part) in SMALL_TOWERS.items():
        configs = {"config.json": {"vision_config": config}}
        with _local_model(arch, configs) as loaded:
            for side in _SIDES:
                runs = tower_runs(loaded.model, side)
                without_ms, with_ms = time_in_turns(runs, 1)  # the largest takes minutes on a CPU
                without_mib, with_mib = (peak_bytes(run) / 2**20 for run in runs)
                share = (with_ms - without_ms) / (part * without_ms)
                rows.append(
                    [
                        *(arch, side * side, f"{without_ms:.0f} ms"),
                        *(beside(with_ms, without_ms, "ms"), f"{share:.1%}"),
                        *(f"{without_mib:.0f} MiB", beside(with_mib, without_mib, "MiB")),
                    ]
                )
    title = "Received attention, and the towers it is taken from, with an eighth of their heads"
    columns = ["tower", "tokens", "without", "with importance", "more of the real tower, computed"]
    return table(title, [*columns, "peak without", "peak with importance"], rows)


def tower_runs(model: Any, side: int) -> list[Callable[[], None]]:
    """Return two calls of a Qwen tower on an image of side² tokens: without and with importance."""
    visual, signals = model.visual, model.tower_signals
    signals.order, signals.is_stated = model.tower_order(4), True  # a token is 2 x 2 patches
    tokens = MediaTokens(side * side, (side * side,), (side,))
    grid = [[1, 2 * side, 2 * side]]
    pixels = torch.randint(256, (4 * side * side, 3 * 2 * visual.patch_size**2), dtype=torch.uint8)

    def plain() -> None:
        visual(pixels, grid_thw=grid)

    def with_importance() -> None:
        with signals.tapped() as take:
            visual(pixels, grid_thw=grid)
            take([tokens])

    return [plain, with_importance]


def attention_growth_table(lengths: tuple[int, ...], repeats: int) -> Table:
    """Measure received attention alone, with as many heads as the towers above."""
    rows = []
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for tokens in lengths:
        query, key = torch.randn(2, tokens, 2, 80, device=this_device(), dtype=dtype)
        call = partial(received_attention, query, key, [tokens], 80**-0.5)
        (spent,), peak = time_in_turns([call], min(repeats, 3)), peak_bytes(call)
        per_pair, per_token = 1e6 * spent / tokens**2, peak / 2**10 / tokens
        row = [tokens, f"{spent:.1f} ms", f"{per_pair:.2f} ns"]
        rows.append([*row, f"{peak / 2**20:.1f} MiB", f"{per_token:.2f} KiB"])
    columns = ["tokens", "time", "per pair of tokens", "peak", "per token"]
    return table("Received attention alone", columns, rows)


def videos_table(repeats: int) -> Table:
    """Embed videos of two lengths, unpruned and pruned."""
    rows: list[list[object]] = []
    options = {"max_model_len": 32768, "max_num_batched_tokens": 8192}
    with _local_model("llava-video", _VIDEO_CONFIGS, image_size=378, **options) as model:
        for frames in _FRAMES:
            video = np.random.default_rng(0).integers(0, 256, (frames, 90, 160, 3), dtype=np.uint8)
            inputs = {k: model.process(_VIDEO_PROMPT, video, budget=k) for k in ("100%", 512)}
            rows += _embedding_rows(frames, model, inputs, repeats)
    title = "One video through LLaVA-Video's tower, projector and, pruned, selection"
    return table(title, ["frames", *_EMBEDDING_COLUMNS], rows)


def peak_memory_table(repeats: int) -> Table:
    """Embed an image with four crops at several budgets."""
    with _local_model("llava-next", _next_configs(*_NEXT_WIDTHS), image_size=336) as model:
        image = Image.effect_noise((672, 672), 64).convert("RGB")
        budgets = ("100%", 640, 320, 160)
        inputs = {k: model.process(_NEXT_PROMPT, image, budget=k) for k in budgets}
        rows = list(_embedding_rows("672x672", model, inputs, repeats))
    title = "One LLaVA-NeXT call, 7B widths: peak of torch's memory above weights"
    return table(title, ["image", *_EMBEDDING_COLUMNS], rows)


def _embedding_rows(
    media: object, model: LocalModel, inputs: Mapping[int | str, Any], repeats: int
) -> Iterator[list[object]]:
    def embed(processed: Any) -> list[torch.Tensor]:
        model.model._pruner.forget_media()  # else only the first call would run the tower
        return model.embed(processed)

    runs = [partial(embed, processed) for processed in inputs.values()]
    tokens = [len(run()[0]) for run in runs]
    times = time_in_turns(runs, min(repeats, 2))
    peaks = [peak_bytes(run) / 2**20 for run in runs]
    for budget, kept, time, peak in zip(inputs, tokens, times, peaks, strict=True):
        row = [media, budget, kept, f"{time:.0f} ms", f"{time / times[0]:.2f}x"]
        yield [*row, f"{peak:.1f} MiB", f"{peak / peaks[0]:.1%}"]


def _next_configs(tower_width: int, text_width: int) -> Configs:
    """Return LLaVA-NeXT with few layers, which do not change the peak memory.

    The activations of a layer are freed before the next.
    """
    tower = {"hidden_size": tower_width, "num_attention_heads": tower_width // 64}
    tower |= {"intermediate_size": 4 * tower_width, "num_hidden_layers": 2}
    heads = text_width // 128
    text = {"hidden_size": text_width, "num_hidden_layers": 2}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {
        "config.json": {"vision_config": tower, "text_config": text},
        "clip/config.json": {"vision_config": tower, "projection_dim": 768},
    }


@contextmanager
def _local_model(
    arch: str, configs: Configs, *, image_size: int = 168, **options: Any
) -> Iterator[LocalModel]:
    """Load a demo model whose config files are changed; its weights are random."""
    with TemporaryDirectory() as directory:
        scratch, path = Path(directory), Path(directory) / "model"
        make_demo_model(path, arch=arch, image_size=image_size)
        for name, changes in configs.items():
            edit_json(path / name, **changes)
        if (encoder := find_text_encoder(path)) is not None:
            (encoder / "model.safetensors").unlink()
            AutoModel.from_config(AutoConfig.from_pretrained(encoder)).save_pretrained(encoder)
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        with one_rank(scratch), torch.inference_mode():
            yield LocalModel(path, load_format="dummy", dtype=dtype, **options)


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file; dictionaries in it keep their other entries."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))


def beside(value: float, other: float, unit: str, digits: int = 0) -> str:
    """Write a value, and how many times another one it is."""
    return f"{value:.{digits}f} {unit} ({value / other:.2f}x)"
