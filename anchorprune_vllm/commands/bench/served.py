# SPDX-License-Identifier: Apache-2.0
"""The model of a benchmark, the servers that serve it, and the media that they are asked about."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from anchorprune_vllm.commands.asking import ask, connect
from anchorprune_vllm.commands.bench import probes
from anchorprune_vllm.commands.bench.load import SERVED_NAME
from anchorprune_vllm.commands.bench.measure import machine
from anchorprune_vllm.commands.bench.shapes import (
    MODEL_SHAPES,
    MediaSize,
    describe_costs,
    sizes_of,
)
from anchorprune_vllm.commands.checks import check_model
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.results_file import write_json
from anchorprune_vllm.testing.demo_models.make import find_text_encoder, make_demo_model
from anchorprune_vllm.testing.media import Media, as_data_url, write_clip
from anchorprune_vllm.testing.server import VllmServer

_WARM_UPS = 2
_WARM_UP_SEED = 10**6  # of no measurement


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint, the media that it is asked about, and the flags that all its servers share."""

    name: str  # the shape, or what the user gave
    path: str
    media: MediaSize
    text_encoder: str | None
    flags: Sequence[str]
    notes: Sequence[str] = ()  # the costs of a shape
    start_seconds: float = 1800

    @contextmanager
    def serve(self, flags: Sequence[str], log: Path) -> Iterator[VllmServer]:
        """Start a server and warm it up: the first requests pay for lazy initialisation."""
        flags = [*("--served-model-name", SERVED_NAME), *probes.FLAGS, *self.flags, *flags]
        with VllmServer(self.path, flags, log, self.start_seconds, probes.ENV) as server:
            probes.start_timing(server)
            client = connect(server.url)
            for number in range(_WARM_UPS):
                media = noise(self.media, _WARM_UP_SEED + number)
                ask(client, media, "What is shown?", model=SERVED_NAME, max_tokens=2)
            yield server

    def hf_config(self) -> Any:
        """Read the config as vLLM does; raise ValueError if that fails."""
        from vllm.transformers_utils.config import get_config

        import anchorprune_vllm

        anchorprune_vllm.register()
        try:
            return get_config(self.path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot read the config of {self.path} ({str(error).splitlines()[0]}): give the "
                "hub id or the path of a checkpoint"
            ) from error

    def check_vllm_prunes(self) -> None:
        """Raise ValueError unless vLLM's own video pruning supports the model.

        vLLM takes `--video-pruning-rate` for any model, and silently serves other ones unpruned.
        """
        from vllm import ModelRegistry
        from vllm.model_executor.models.interfaces import supports_multimodal_pruning

        names = self.hf_config().architectures or []
        known = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
        if not known or not supports_multimodal_pruning(known[0].load_model_cls()):
            raise ValueError(
                f"--vllm-video-pruning: vLLM does not prune the videos of {self.name} "
                f"({', '.join(names) or 'no architecture in its config'}), it would serve it "
                "unpruned; leave the flag out, or give a model that vLLM prunes, as Qwen2.5-VL"
            )


@dataclass(frozen=True)
class Comparison:
    """What the user wants to be compared, and where the results go."""

    model: ServedModel
    methods: Sequence[ChosenMethod]
    budgets: Sequence[str]
    out: Path
    command: str  # as the user typed it

    def print_model(self, console: Console) -> None:
        """Say which model is served."""
        console.print(f"[bold]Model[/bold]  {self.model.name}", *self.model.notes, sep="\n")

    def write(self, name: str, **results: object) -> None:
        """Write a file of results, with all that is needed to repeat them."""
        about = {"command": self.command, "model": self.model.name, "machine": machine()}
        write_json(self.out / name, {**about, **results}, indent=1)


def noise(size: MediaSize, seed: int) -> Media:
    """Return an image or video of random pixels; each seed gives another one."""
    pixels = np.random.default_rng(seed).integers(
        256, size=(size.frames, size.height, size.width, 3), dtype=np.uint8
    )
    frames = [Image.fromarray(frame) for frame in pixels]
    if len(frames) == 1:
        return Media("picture", as_data_url(frames[0]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "video.mp4"
        write_clip(path, frames, fps=8)
        encoded = base64.b64encode(path.read_bytes()).decode()
    return Media("clip", f"data:video/mp4;base64,{encoded}")


def checkpoint(
    model: str, media: MediaSize | None, text_encoder: str | None, flags: Sequence[str]
) -> ServedModel:
    """Return a model of the user's; raise ValueError if there is none."""
    check_model(model)
    if text_encoder is not None:
        check_model(text_encoder, "text encoder")
    elif found := find_text_encoder(Path(model)):
        text_encoder = str(found)
    return ServedModel(model, model, media or MediaSize(672, 672), text_encoder, flags)


def random_model(
    name: str,
    scale: float | None,
    media: MediaSize | None,
    flags: Sequence[str],
    directory: Path,
) -> ServedModel:
    """Make the checkpoint of a shape in `directory`, unless it is there."""
    shape = MODEL_SHAPES[name]
    scale = shape.default_scale if scale is None else scale
    path = directory / f"{name}-{scale:g}"
    make_demo_model(
        path, arch=shape.arch, image_size=shape.image_size, sizes=sizes_of(shape, scale)
    )
    text_encoder = find_text_encoder(path)
    # On a CPU, compiling would take longer than the benchmark.
    on_cpu = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "4G"]
    device_flags = ["--dtype", "bfloat16"] if torch.cuda.is_available() else on_cpu
    return ServedModel(
        name=f"{name}, scale {scale:g}",
        path=str(path),
        media=media or shape.media,
        text_encoder=None if text_encoder is None else str(text_encoder),
        flags=[*device_flags, "--max-model-len", "4096", *flags],
        notes=describe_costs(shape, scale),
    )
