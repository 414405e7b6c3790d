# SPDX-License-Identifier: Apache-2.0
"""Tiny models that can be pruned, made in a second, without a GPU or a network.

vLLM and transformers load them like the real ones. The weights are random, but for two models that
are trained and come with this package. Many more families: `anchorprune_vllm.testing.tiny_models`.
"""

import hashlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from anchorprune_vllm.testing.demo_models.llava import PATCH, write_llava, write_llava_next
from anchorprune_vllm.testing.demo_models.onevision import write_llava_video, write_onevision
from anchorprune_vllm.testing.demo_models.qwen import write_qwen2_5_vl
from anchorprune_vllm.testing.demo_models.random_weights import TINY, Config, Sizes
from anchorprune_vllm.testing.tiny_models import FAMILIES, describe_family

_RECIPE = 1  # raise it when the same parameters begin to give other bytes
_RECORD = "demo_model.json"
_TEXT_ENCODERS = ("clip", "siglip")
_IMAGE_SIZE = 168

ARCHITECTURES = {
    "llava-1.5": write_llava,
    "llava-next": write_llava_next,
    "qwen2.5-vl": write_qwen2_5_vl,
    "llava-onevision": write_onevision,
    "llava-video": write_llava_video,
}
"""With random weights, of any sizes; the families of `tiny_models` have one size each."""

TRAINED: dict[str, Mapping[str, Any]] = {
    "llava-1.5": {"similarity": "raw"},
    "qwen2.5-vl": {"matching": "mean"},
}
"""The architectures that also come with trained weights, and the settings to prune them with.

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
    """Write a model to `directory`, its text encoder under it, unless they are there.

    `arch` is one of `ARCHITECTURES` or of `tiny_models.FAMILIES`; the latter have fixed sizes.

    Same arguments, same bytes. An image (llava-next: each of its tiles) is (image_size / 14)²
    visual tokens; to qwen2.5-vl a small one is, and a large one up to 9 times as many.
    Answers are words and end only at `max_tokens`. The model appears under its name when it is
    complete, not before. Raises ValueError rather than overwrite anything.
    """
    if arch in FAMILIES:
        if image_size != _IMAGE_SIZE or sizes != TINY:
            raise ValueError(f"arch is {arch!r}: its sizes are fixed, give no image_size or sizes")
        wanted: Config = {"recipe": _RECIPE, "arch": arch, "seed": seed}
        _make(directory, wanted, lambda model: describe_family(arch).write(model, seed))
        return
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}: give one of {', '.join([*ARCHITECTURES, *FAMILIES])}")
    if image_size < PATCH or image_size % PATCH:
        raise ValueError(f"image_size is {image_size}: give a positive multiple of {PATCH}")
    wanted = {"recipe": _RECIPE, "arch": arch, "seed": seed, "image_size": image_size}
    if sizes != TINY:
        wanted["sizes"] = asdict(sizes)
    write = ARCHITECTURES[arch]
    _make(directory, wanted, lambda model: write(model, seed, image_size, sizes))


def make_trained_model(directory: Path, arch: str = "llava-1.5") -> None:
    """Write the trained model of an architecture to `directory`, as `make_demo_model` does."""
    if arch not in TRAINED:
        raise ValueError(f"arch is {arch!r}: give one that is trained, {' or '.join(TRAINED)}")
    files = _TRAINED_FILES / arch
    weights = b"".join(file.read_bytes() for file in sorted(files.rglob("*.safetensors")))
    # A model made from earlier weights is another one.
    digest = hashlib.sha256(weights).hexdigest()[:16]
    wanted: Config = {"recipe": _RECIPE, "arch": arch, "weights": digest}
    _make(directory, wanted, lambda model: shutil.copytree(files, model))


def _make(directory: Path, wanted: Config, write: Callable[[Path], object]) -> None:
    """Make the wanted model by `write`, unless it is there."""
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
        except OSError:  # another process may have been faster: its model is as good as ours
            if not _is_complete(directory, wanted):
                raise


def find_text_encoder(model: Path) -> Path | None:
    """The paired CLIP or SigLIP under a demo model's directory; None: it needs none."""
    return next((model / name for name in _TEXT_ENCODERS if (model / name).is_dir()), None)


def pruning_flags(model: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of `vllm serve` for a demo model's text encoder, and for some settings."""
    text_encoder = find_text_encoder(model)
    return [
        *(["--anchorprune-text-encoder", str(text_encoder)] if text_encoder else []),
        *(["--anchorprune-config", json.dumps(dict(settings))] if settings else []),
    ]


def describe(directory: Path) -> str:
    """One line: architecture, visual tokens per image, parameters, size on disk, vLLM's flags."""
    directory = Path(directory)
    pair = find_text_encoder(directory)
    more = f" (and its text encoder's {_parameters(pair):.2f} M)" if pair else ""
    return (
        f"{_architecture_and_visual_tokens(directory)}, "
        f"{_parameters(directory):.2f} M parameters{more}, "
        f"{sum(_file_sizes(directory).values()) / 1e6:.1f} MB on disk"
        f"{_flags(directory)}"
    )


def _architecture_and_visual_tokens(directory: Path) -> str:
    arch = _read_json(directory / _RECORD)["arch"]
    if arch in FAMILIES:
        checkpoint = describe_family(arch)
        small, large = checkpoint.visual_tokens
        return (
            f"{checkpoint.architecture_name}: {small} visual tokens for an image of 300x200 "
            f"pixels, {large} for one of 1200x900"
        )
    config = _read_json(directory / "config.json")
    return f"{config['architectures'][0]}: {_visual_tokens(directory, config)}"


def _flags(directory: Path) -> str:
    record = _read_json(directory / _RECORD)
    arch = record["arch"]
    arguments = describe_family(arch).engine_arguments if arch in FAMILIES else {}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in arguments.items()]
    if "weights" in record:
        flags.append(shlex.join(pruning_flags(directory, TRAINED[arch])))
    return f"; serve it with {' '.join(flags)}" if flags else ""


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
    pooled = f"; {(side // 2) ** 2} per frame" if _takes_frames(config) else ""
    return f"{side**2} visual tokens per{tiles}{pooled}"


def _takes_frames(config: Config) -> bool:
    return config["model_type"] in ("llava_onevision", "llava_qwen")


def _parameters(directory: Path) -> float:
    """In millions."""
    (path,) = directory.glob("*.safetensors")
    return sum(weight.numel() for weight in load_file(path).values()) / 1e6


def _is_complete(directory: Path, wanted: Config) -> bool:
    """Whether the wanted model is there; False if nothing is; ValueError if something else is."""
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
