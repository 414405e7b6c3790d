# SPDX-License-Identifier: Apache-2.0
"""The model of a benchmark, and the servers that it is put into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anchorprune_vllm.commands.asking import ask, connect
from anchorprune_vllm.commands.bench import probes
from anchorprune_vllm.commands.bench.load import SERVED_NAME
from anchorprune_vllm.commands.bench.noise import noise
from anchorprune_vllm.commands.bench.shapes import SHAPES, Media, arithmetic, sizes_of
from anchorprune_vllm.commands.checks import check_model
from anchorprune_vllm.testing.demo_models.make import find_text_encoder, make_demo_model
from anchorprune_vllm.testing.server import VllmServer

_WARM_UPS = 2
_WARM_UP_SEED = 10**6  # of no measurement


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint, the media it is asked about, and how it is started whatever is compared."""

    name: str
    """To people: the shape, or what was given."""
    path: str
    media: Media
    text_encoder: str | None
    flags: Sequence[str]
    notes: Sequence[str] = ()
    """The arithmetic of a shape."""
    start_seconds: float = 1800

    @contextmanager
    def serve(self, flags: Sequence[str], log: Path) -> Iterator[VllmServer]:
        """A server that has answered once or twice: the first requests pay for lazy steps."""
        every = [*("--served-model-name", SERVED_NAME), *probes.FLAGS, *self.flags, *flags]
        with VllmServer(self.path, every, log, self.start_seconds, probes.ENV) as server:
            probes.start_timing(server)
            client = connect(server.url)
            for number in range(_WARM_UPS):
                picture = noise(self.media, _WARM_UP_SEED + number)
                ask(client, picture, "What is to be seen?", model=SERVED_NAME, max_tokens=2)
            yield server

    def hf_config(self) -> Any:
        """As vLLM reads it; ValueError if it cannot."""
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
        """Raise ValueError unless vLLM's own video pruning knows the model.

        vLLM takes `--video-pruning-rate` for any model, and serves those that it does not prune
        unpruned without a word.
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


def served_model(
    *,
    shape: str | None,
    model: str | None,
    scale: float | None,
    media: Media | None,
    text_encoder: str | None,
    server_args: Sequence[str],
    directory: Path,
    start_seconds: float = 1800,
) -> ServedModel:
    """Make a shape's checkpoint in `directory`, or take one that is there."""
    beside: Path | None
    if shape is None:
        assert model is not None
        if scale is not None:
            raise ValueError("--scale is for --shape: a checkpoint has the size that it has")
        check_model(model)
        if text_encoder is not None:
            check_model(text_encoder, "text encoder")
        elif beside := find_text_encoder(Path(model)):
            text_encoder = str(beside)
        size = media or Media(672, 672)
        return ServedModel(
            *(model, model, size, text_encoder, server_args), start_seconds=start_seconds
        )
    if text_encoder is not None:
        raise ValueError("--text-encoder is for --model: a shape brings its own")
    wanted = SHAPES[shape]
    used_scale = wanted.default_scale if scale is None else scale
    path = directory / f"{shape}-{used_scale:g}"
    make_demo_model(
        path, arch=wanted.arch, image_size=wanted.image_size, sizes=sizes_of(wanted, used_scale)
    )
    beside = find_text_encoder(path)
    device_flags = (
        ["--dtype", "bfloat16"]
        if torch.cuda.is_available()
        # On a CPU, compiling would take longer than the benchmark.
        else ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "4G"]
    )
    return ServedModel(
        name=f"{shape}, scale {used_scale:g}",
        path=str(path),
        media=media or wanted.media,
        text_encoder=None if beside is None else str(beside),
        flags=[*device_flags, "--max-model-len", "4096", *server_args],
        notes=arithmetic(wanted, used_scale),
        start_seconds=start_seconds,
    )
