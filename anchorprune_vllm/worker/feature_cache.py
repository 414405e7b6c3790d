# SPDX-License-Identifier: Apache-2.0
"""A cache of vision-tower outputs, so that a new question does not run the tower again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from anchorprune_vllm.signals.features import MediaFeatures

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each cached field of `MediaFeatures`, per token."""


class FeatureCache:
    """A cache of `MediaFeatures` in memory that is allocated once, when the cache is made.

    Memory is divided into pages of `page_tokens` tokens, and an item owns as many as it needs. The
    least recently used items are dropped first. `get` returns views of the pages where it can, so
    use them before the next `put`.
    """

    def __init__(
        self, capacity_bytes: int, page_tokens: int, layout: Layout, device: torch.device
    ) -> None:
        token_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        self._page_bytes = page_tokens * token_bytes
        pages = capacity_bytes // self._page_bytes
        self._stores = {
            name: torch.empty(pages, page_tokens, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in layout.items()
        }
        self._pages, self._page_tokens = pages, page_tokens
        self._free = list(range(pages))
        self._entries: OrderedDict[Hashable, tuple[list[int], int]] = OrderedDict()

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self._pages * self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the pages that hold an item."""
        return (self._pages - len(self._free)) * self._page_bytes

    def get(self, key: Hashable) -> MediaFeatures | None:
        """Return the features of an item, or None if they are not in the cache."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return MediaFeatures(**{name: _read(store, *entry) for name, store in self._stores.items()})

    def put(self, key: Hashable, features: MediaFeatures) -> None:
        """Store a copy, and drop the least recently used items for it.

        An item that is larger than the cache is not stored.
        """
        tokens = len(features.rows)
        needed = -(-tokens // self._page_tokens)
        if key in self._entries or needed > self._pages:
            return
        while len(self._free) < needed:
            _, (pages, _) = self._entries.popitem(last=False)
            self._free.extend(pages)
        pages = [self._free.pop() for _ in range(needed)]
        for name, part in features.parts().items():
            _write(self._stores[name], pages, part)
        self._entries[key] = (pages, tokens)

    def clear(self) -> None:
        """Drop all items, as after a change of the vision tower's weights."""
        for pages, _ in self._entries.values():
            self._free.extend(pages)
        self._entries.clear()


def _read(store: Tensor, pages: Sequence[int], tokens: int) -> Tensor:
    if len(pages) == 1:
        return store[pages[0], :tokens]
    return torch.cat([store[page] for page in pages])[:tokens]


def _write(store: Tensor, pages: Sequence[int], values: Tensor) -> None:
    for page, chunk in zip(pages, values.split(store.shape[1]), strict=True):
        store[page, : len(chunk)].copy_(chunk)
