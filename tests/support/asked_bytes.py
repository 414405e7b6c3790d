# SPDX-License-Identifier: Apache-2.0
"""Memory that torch is asked for, counted: the same on every machine, however busy it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AskedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, views of others left out."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in tree_leaves(made):
            if _is_tensor(leaf) and _memory(leaf) not in known:
                known.add(_memory(leaf))
                size = leaf.untyped_storage().nbytes()
                self.total += size
                self.largest = max(self.largest, size)
        return made


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
