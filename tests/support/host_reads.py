# SPDX-License-Identifier: Apache-2.0
"""A look-out for code that makes the host wait for a device, on a machine without one."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Refuses the operators for which the host has to wait for a device."""

    FORBIDDEN = (
        *("_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "equal", "is_nonzero"),
        *("unique_consecutive", "_unique2", "unique_dim", "masked_select", "argwhere", "bincount"),
        *("allclose", "histc", "repeat_interleave"),
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} reads from the device"
        if name in ("index", "index_put", "index_put_"):  # a mask as an index is a nonzero
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))
