# SPDX-License-Identifier: Apache-2.0
"""The picture or video that is asked about, as a client would send it."""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass
from pathlib import Path

import cv2
from PIL import Image, UnidentifiedImageError

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, TEST_SCENES, scene
from anchorprune_vllm.testing.media import Media, as_data_url

_DRAWN = {"clutter": cluttered_scene, "scene": scene}


@dataclass(frozen=True)
class Asked:
    """A question about a picture or video."""

    name: str
    media: Media
    question: str


def read_asked(name: str, question: str | None) -> Asked:
    """Read a file, or draw `clutter:NUMBER` or `scene:NUMBER`, which bring questions of their own.

    Raises ValueError for anything else.
    """
    kind, colon, number = name.partition(":")
    if colon and kind in _DRAWN:
        media, own = _drawn(kind, number)
    else:
        media, own = _read(Path(name)), None
    asked = own if question is None else question
    if asked is None or not asked.strip():
        raise ValueError(
            f"there is no question about {name}: give one as the third argument (with --query none "
            "it is not looked at)"
        )
    return Asked(name, media, asked)


def _drawn(kind: str, number: str) -> tuple[Media, str]:
    """Draw a scene for tests, and take its first question that is not answered by yes or no."""
    if not number.isdecimal() or int(number) >= TEST_SCENES:
        raise ValueError(
            f"there is no {kind} {number!r}: give {kind}:0 to {kind}:{TEST_SCENES - 1}, or a file"
        )
    picture = _DRAWN[kind](FIRST_TEST_SCENE + int(number))
    question = next(each for each in picture.questions if each.kind != "yes/no")
    return Media("picture", as_data_url(picture.load())), question.text


def _read(path: Path) -> Media:
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}: give a picture or a video, or clutter:NUMBER for a drawn one"
        )
    kind = "picture" if _is_picture(path) else "clip"
    if kind == "clip" and not _is_video(path):
        raise ValueError(
            f"{path} is neither a picture that Pillow can read nor a video that OpenCV can read"
        )
    fallback = {"picture": "image/png", "clip": "video/mp4"}[kind]
    mime = mimetypes.guess_type(path.name)[0] or fallback
    encoded = base64.b64encode(path.read_bytes()).decode()
    return Media(kind, f"data:{mime};base64,{encoded}")


def _is_picture(path: Path) -> bool:
    try:
        with Image.open(path) as picture:
            picture.load()
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return False
    return True


def _is_video(path: Path) -> bool:
    capture = cv2.VideoCapture(str(path))
    try:
        return bool(capture.read()[0])
    finally:
        capture.release()
