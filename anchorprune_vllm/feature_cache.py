# SPDX-License-Identifier: Apache-2.0
"""Vision-tower outputs of recent media, so that a new question does not run the tower again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MediaFeatures:
    """What selection needs of one image or video: depends on the media alone, on no question."""

    hidden: Tensor
    """[N, D]: the selected hidden layer, in the model's dtype."""
    importance: Tensor
    """float32 [N]."""


class FeatureCache:
    """Least recently used `MediaFeatures`, in memory that is taken once, at construction.

    Memory is cut into pages of `page_tokens` tokens; an item owns as many as it needs. `get` gives
    views of the pages where it can: use them before the next `put`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        page_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        token_bytes = hidden_size * dtype.itemsize + torch.float32.itemsize
        pages = capacity_bytes // (page_tokens * token_bytes)
        self._hidden = torch.empty(pages, page_tokens, hidden_size, dtype=dtype, device=device)
        self._importance = torch.empty(pages, page_tokens, dtype=torch.float32, device=device)
        self._free = list(range(pages))
        self._entries: OrderedDict[Hashable, tuple[list[int], int]] = OrderedDict()

    def get(self, key: Hashable) -> MediaFeatures | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        pages, tokens = entry
        return MediaFeatures(
            _read(self._hidden, pages, tokens), _read(self._importance, pages, tokens)
        )

    def put(self, key: Hashable, features: MediaFeatures) -> None:
        """Keep a copy, in place of what was used least recently; too large an item is not kept."""
        tokens, page_tokens = len(features.importance), self._importance.shape[1]
        needed = -(-tokens // page_tokens)
        if key in self._entries or needed > len(self._importance):
            return
        while len(self._free) < needed:
            _, (pages, _) = self._entries.popitem(last=False)
            self._free.extend(pages)
        pages = [self._free.pop() for _ in range(needed)]
        _write(self._hidden, pages, features.hidden)
        _write(self._importance, pages, features.importance)
        self._entries[key] = (pages, tokens)

    def clear(self) -> None:
        """Forget everything: the vision tower's weights have changed."""
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
