# SPDX-License-Identifier: Apache-2.0
"""Make tiny models that can be pruned, in a second, without a GPU or a network.

vLLM and transformers load them like the real ones. The weights are random, but for two models that
are trained and come with this package.
"""

import hashlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from anchorprune_vllm.testing.demo_models import llava, qwen
from anchorprune_vllm.testing.demo_models.random_weights import TINY, Config, Sizes
from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from anchorprune_vllm.testing.tiny_models.description import PATCH

_RECIPE = 1  # Raise it when the same arguments begin to give other bytes.
_RECORD = "demo_model.json"
_TEXT_ENCODERS = ("clip", "siglip")
_IMAGE_SIZE = 168

DEMO_MODELS: dict[str, Callable[[Path, int, int, Sizes], None]] = {
    "llava-1.5": llava.write_llava,
    "llava-next": partial(llava.write_llava, with_crops=True),
    "qwen2.5-vl": qwen.write_qwen2_5_vl,
    "llava-onevision": llava.write_onevision,
    "llava-video": llava.write_llava_video,
}
"""The models with random weights of any size; those of `TINY_MODELS` have one size each."""

TRAINED: dict[str, Mapping[str, Any]] = {
    "llava-1.5": {"similarity": "raw"},
    "qwen2.5-vl": {"matching": "mean"},
}
"""The demo models that also come with trained weights, and the settings to prune them with.

They answer questions about coloured shapes (examples/train_demo). The patches of the small CLIP are
most similar to the words that are true of them, while those of OpenAI's are least similar. And the
best match with one word cannot tell a red star from other stars, which the mean of all words can.
"""
_TRAINED_FILES = Path(__file__).parents[1] / "trained_models"


def make_demo_model(
    directory: Path,
    *,
    arch: str = "llava-1.5",
    seed: int = 0,
    image_size: int = _IMAGE_SIZE,
    sizes: Sizes = TINY,
) -> None:
    """Write a model to `directory`, and its text encoder under it, unless they are there.

    `arch` is one of `DEMO_MODELS` or of `TINY_MODELS`; the latter have fixed sizes.

    The same arguments give the same bytes. An image (of llava-next: each of its tiles) has
    (image_size / 14)² visual tokens; for qwen2.5-vl a small one has, and a large one up to 9 times
    as many. Answers are words and end only at `max_tokens`. The model appears under its name when
    it is complete, not before. Raises ValueError rather than overwrite anything.
    """
    wanted: Config = {"recipe": _RECIPE, "arch": arch, "seed": seed}
    if tiny := TINY_MODELS.get(arch):
        if image_size != _IMAGE_SIZE or sizes != TINY:
            raise ValueError(f"arch is {arch!r}: its sizes are fixed, give no image_size or sizes")
        _make(directory, wanted, lambda model: tiny.write(model, seed))
        return
    if arch not in DEMO_MODELS:
        names = ", ".join([*DEMO_MODELS, *TINY_MODELS])
        raise ValueError(f"arch is {arch!r}: give one of {names}")
    if image_size < PATCH or image_size % PATCH:
        raise ValueError(f"image_size is {image_size}: give a positive multiple of {PATCH}")
    wanted["image_size"] = image_size
    if sizes != TINY:
        wanted["sizes"] = asdict(sizes)
    write = DEMO_MODELS[arch]
    _make(directory, wanted, lambda model: write(model, seed, image_size, sizes))


def make_trained_model(directory: Path, arch: str = "llava-1.5") -> None:
    """Write a trained demo model to `directory`, as `make_demo_model` does."""
    if arch not in TRAINED:
        raise ValueError(f"arch is {arch!r}: give one that is trained, {' or '.join(TRAINED)}")
    files = _TRAINED_FILES / arch
    weights = b"".join(file.read_bytes() for file in sorted(files.rglob("*.safetensors")))
    # A model made from earlier weights is another one.
    digest = hashlib.sha256(weights).hexdigest()[:16]
    wanted: Config = {"recipe": _RECIPE, "arch": arch, "weights": digest}
    _make(directory, wanted, lambda model: shutil.copytree(files, model))


def _make(directory: Path, wanted: Config, write: Callable[[Path], object]) -> None:
    """Make the wanted model with `write`, unless it is there."""
    directory = Path(directory).resolve()
    if _is_complete(directory, wanted):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        model = Path(scratch) / "model"
        write(model)
        record = json.dumps(wanted | {"files": _file_sizes(model)}, indent=2)
        (model / _RECORD).write_text(record + "\n", encoding="utf-8")
        try:
            model.rename(directory)
        except OSError:  # Another process may have been faster: its model is as good as this one.
            if not _is_complete(directory, wanted):
                raise


def find_text_encoder(model: Path) -> Path | None:
    """Return the paired CLIP or SigLIP under a demo model's directory; None if it needs none."""
    return next((model / name for name in _TEXT_ENCODERS if (model / name).is_dir()), None)


def pruning_flags(model: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of `vllm serve` for a demo model's text encoder and these settings."""
    text_encoder = find_text_encoder(model)
    return [
        *(["--anchorprune-text-encoder", str(text_encoder)] if text_encoder else []),
        *(["--anchorprune-config", json.dumps(dict(settings))] if settings else []),
    ]


def describe(directory: Path) -> str:
    """Describe a demo model in one line, from its architecture to the flags to serve it with."""
    directory = Path(directory)
    record = _read_json(directory / _RECORD)
    if tiny := TINY_MODELS.get(record["arch"]):
        architecture, (small, large) = tiny.architecture, tiny.visual_tokens
        tokens = (
            f"{small} visual tokens for an image of 300x200 pixels, {large} for one of 1200x900"
        )
        options = tiny.engine_arguments.items()
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options)
    else:
        config = _read_json(directory / "config.json")
        architecture, tokens = config["architectures"][0], _visual_tokens(directory, config)
        is_trained = "weights" in record
        flags = shlex.join(pruning_flags(directory, TRAINED[record["arch"]])) if is_trained else ""
    beside = find_text_encoder(directory)
    more = f" (and its text encoder's {_parameters(beside):.2f} M)" if beside else ""
    return (
        f"{architecture}: {tokens}, {_parameters(directory):.2f} M parameters{more}, "
        f"{sum(_file_sizes(directory).values()) / 1e6:.1f} MB on disk"
        f"{f'; serve it with {flags}' if flags else ''}"
    )


def _visual_tokens(directory: Path, config: Config) -> str:
    if config["model_type"] == "qwen2_5_vl":
        sizes = _read_json(directory / "preprocessor_config.json")
        token = sizes["patch_size"] * sizes["merge_size"]
        least, most = (sizes[name] // token**2 for name in ("min_pixels", "max_pixels"))
        if least == most:
            return f"{least} visual tokens per square image"
        return f"{least} visual tokens per small image, up to {most} per large one"
    tile = config["vision_config"]["image_size"]
    pinpoints = config.get("image_grid_pinpoints", [])
    crops = max((height * width // tile**2 for height, width in pinpoints), default=0)
    tiles = f" tile, a base view and up to {crops} crops" if crops else " image"
    side = tile // PATCH
    takes_frames = config["model_type"] in ("llava_onevision", "llava_qwen")
    pooled = f"; {(side // 2) ** 2} per frame" if takes_frames else ""
    return f"{side**2} visual tokens per{tiles}{pooled}"


def _parameters(directory: Path) -> float:
    """Return the number of a checkpoint's parameters in millions."""
    (path,) = directory.glob("*.safetensors")
    return sum(weight.numel() for weight in load_file(path).values()) / 1e6


def _is_complete(directory: Path, wanted: Config) -> bool:
    """Tell whether the wanted model is there; raises ValueError if something else is."""
    if not directory.exists():
        return False
    remedy = "remove it, or choose another directory"
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file: {remedy}")
    found = sorted(path.name for path in directory.iterdir())
    if not found:
        return False
    if _RECORD not in found:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise ValueError(f"{directory} is not a demo model, it holds {shown}: {remedy}")
    record = _read_json(directory / _RECORD)
    expected, present = record.pop("files"), _file_sizes(directory)
    if record != wanted:
        raise ValueError(f"{directory} is a demo model of {record}, not of {wanted}: {remedy}")
    damaged = sorted(name for name in expected if present.get(name) != expected[name])
    if damaged:
        raise ValueError(f"{directory}: {', '.join(damaged)} missing or changed: {remedy}")
    return True


def _read_json(path: Path) -> Config:
    content: Config = json.loads(path.read_text(encoding="utf-8"))
    return content


def _file_sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
