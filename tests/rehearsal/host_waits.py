# SPDX-License-Identifier: Apache-2.0
"""Whose code made the host wait for the device, and where."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary

import vllm

import anchorprune_vllm
from tests.rehearsal.report import HostWait
from tests.simcuda.waits import Wait

_OURS, _VLLMS = (str(Path(package.__file__ or "").parent) for package in (anchorprune_vllm, vllm))

_CHECK = "vllm/utils/gpu_sync_debug.py"  # it stands between every copy and its caller


def summed_up(waits: Iterable[Wait]) -> list[HostWait]:
    """Waits by the place in our code or vLLM's that they come from."""
    places: dict[tuple[str, str, str, int | None, bool], HostWait] = {}
    for wait in waits:
        frame = _innermost(wait.stack)
        in_encoder = any(each.name == "embed_multimodal" for each in wait.stack)
        key = (wait.kind, wait.what, frame.filename, frame.lineno, in_encoder)
        if key not in places:
            places[key] = HostWait(
                kind=wait.kind,
                what=wait.what,
                is_ours=frame.filename.startswith(_OURS),
                in_encoder=in_encoder,
                where=f"{_short(frame.filename)}:{frame.name}",
                line=frame.line or "",
            )
        places[key].times += 1
    return list(places.values())


def _innermost(stack: tuple[FrameSummary, ...]) -> FrameSummary:
    """The last call of our code or vLLM's."""
    known = (
        frame
        for frame in reversed(stack)
        if frame.filename.startswith((_OURS, _VLLMS)) and not frame.filename.endswith(_CHECK)
    )
    return next(known, stack[-1])


def _short(filename: str) -> str:
    for root in (_OURS, _VLLMS):
        if filename.startswith(root):
            return str(Path(filename).relative_to(Path(root).parent))
    return filename
