# SPDX-License-Identifier: Apache-2.0
"""A cache of HF processor outputs, so that a new question does not prepare an image again.

vLLM's processor cache is keyed by an item's identity, which includes the question. This cache
stands behind it in the API process and is keyed by the media alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import BatchFeature


class PixelCache:
    """A thread-safe cache of outputs for single items; the least recently used are dropped."""

    def __init__(self, capacity_bytes: int) -> None:
        self._outputs: LRUCache[Hashable, BatchFeature] = LRUCache(capacity_bytes, _bytes)
        self._lock = Lock()

    def get(self, key: Hashable, process: Callable[[], BatchFeature]) -> BatchFeature:
        """Return the output for a key, cached or from `process`; it must not be modified."""
        with self._lock:
            output = self._outputs.get(key)
        if output is None:
            output = process()
            with self._lock:
                # GPU memory belongs to the worker, whose accounting does not include this cache.
                if _bytes(output) <= self._outputs.maxsize and _is_on_host(output):
                    self._outputs[key] = output
        return output


def joined(outputs: Sequence[BatchFeature]) -> BatchFeature:
    """Return the outputs of several items as the HF processor would return them together.

    Tensors are concatenated along the first axis; items of different shapes form a list.
    """
    names = dict.fromkeys(name for output in outputs for name in output)
    return BatchFeature({name: _join([o[name] for o in outputs if name in o]) for name in names})


def _join(parts: Sequence[Any]) -> Any:
    is_shared = isinstance(parts[0], Tensor) and not parts[0].ndim  # a value common to all items
    if len(parts) == 1 or is_shared:
        return parts[0]
    shapes = {part.shape[1:] if isinstance(part, Tensor) else None for part in parts}
    if len(shapes) == 1 and None not in shapes:
        return torch.cat(list(parts))
    return [item for part in parts for item in part]


def _bytes(output: BatchFeature) -> int:
    return sum(tensor.nbytes for value in output.values() for tensor in _tensors(value))


def _is_on_host(output: BatchFeature) -> bool:
    return all(tensor.is_cpu for value in output.values() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
