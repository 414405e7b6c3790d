# SPDX-License-Identifier: Apache-2.0
"""The image or video that is asked about, as a client would send it."""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass
from pathlib import Path

import cv2
from PIL import Image

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, TEST_SCENES, scene
from anchorprune_vllm.testing.media import Media, as_data_url

_DRAWN = {"clutter": cluttered_scene, "scene": scene}


@dataclass(frozen=True)
class Asked:
    """A question about an image or video."""

    name: str
    media: Media
    question: str


def read_asked(name: str, question: str | None) -> Asked:
    """Read a file, or draw `clutter:NUMBER` or `scene:NUMBER`, which have questions of their own.

    Raises ValueError for anything else, and if there is no question.
    """
    kind, colon, number = name.partition(":")
    if colon and kind in _DRAWN:
        media, own = _drawn(kind, number)
    else:
        media, own = _read(Path(name)), ""
    asked = own if question is None else question
    if not asked.strip():
        raise ValueError(
            f"there is no question about {name}: give one as the third argument (with --query none "
            "it is not looked at)"
        )
    return Asked(name, media, asked)


def _drawn(kind: str, number: str) -> tuple[Media, str]:
    """Draw a test scene, and take its first question that is not answered by yes or no."""
    if not number.isdecimal() or int(number) >= TEST_SCENES:
        raise ValueError(
            f"there is no {kind} {number!r}: give {kind}:0 to {kind}:{TEST_SCENES - 1}, or a file"
        )
    drawn = _DRAWN[kind](FIRST_TEST_SCENE + int(number))
    question = next(each for each in drawn.questions if each.kind != "yes/no")
    return Media("picture", as_data_url(drawn.load())), question.text


def _read(path: Path) -> Media:
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}: give an image or a video, or clutter:NUMBER for a drawn one"
        )
    if _is_image(path):
        kind, usual = "picture", "image/png"
    elif cv2.VideoCapture(str(path)).read()[0]:
        kind, usual = "clip", "video/mp4"
    else:
        raise ValueError(
            f"{path} is neither an image that Pillow can read nor a video that OpenCV can read: "
            "convert it, for example to PNG or MP4"
        )
    mime = mimetypes.guess_type(path.name)[0] or usual
    return Media(kind, f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}")


def _is_image(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, Image.DecompressionBombError):
        return False
    return True
