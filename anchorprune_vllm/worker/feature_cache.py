# SPDX-License-Identifier: Apache-2.0
"""Vision-tower outputs of recent media, so that a new question does not run the tower again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod

import torch
from torch import Tensor

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Of what is kept of a token: shape and dtype of each part of its `MediaFeatures`."""


@dataclass(frozen=True)
class MediaFeatures:
    """What selection needs of one image or video: depends on the media alone, on no question."""

    hidden: Tensor
    """[N, D]: the selected hidden layer, in the model's dtype."""
    importance: Tensor | None = None
    """float32 [N], for methods that need it."""
    keys: Tensor | None = None
    """[N, heads, head size], for methods that need them."""
    object_attention: Tensor | None = None
    """float32 [N], for methods that need it."""

    @property
    def importance_or_empty(self) -> Tensor:
        """[N], or [0] for methods that do not look at it: one that does would notice."""
        return self.hidden.new_empty(0) if self.importance is None else self.importance

    def parts(self) -> dict[str, Tensor]:
        """Those that are there."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def regrouped(self, split: Callable[[Tensor], Sequence[Tensor]]) -> list[MediaFeatures]:
        """One of each group that `split` makes of a part."""
        groups = {name: split(part) for name, part in self.parts().items()}
        return [
            MediaFeatures(**dict(zip(groups, group, strict=True)))
            for group in zip(*groups.values(), strict=True)
        ]

    @classmethod
    def joined(cls, pieces: Sequence[MediaFeatures]) -> MediaFeatures:
        """Tokens of all pieces, one behind the other."""
        names = pieces[0].parts()
        return cls(**{name: torch.cat([getattr(p, name) for p in pieces]) for name in names})


class FeatureCache:
    """Least recently used `MediaFeatures`, in memory that is taken once, at construction.

    Memory is cut into pages of `page_tokens` tokens; an item owns as many as it needs. `get` gives
    views of the pages where it can: use them before the next `put`.
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
        """Of all pages."""
        return self._pages * self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Of pages that hold an item."""
        return (self._pages - len(self._free)) * self._page_bytes

    def get(self, key: Hashable) -> MediaFeatures | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return MediaFeatures(**{name: _read(store, *entry) for name, store in self._stores.items()})

    def put(self, key: Hashable, features: MediaFeatures) -> None:
        """Keep a copy, in place of what was used least recently; too large an item is not kept."""
        tokens = len(features.hidden)
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
