# SPDX-License-Identifier: Apache-2.0
"""Every wait of the host is reported, and torch and vLLM notice those that they notice on CUDA."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.simcuda.tensors import kinds, on_device
from tests.simcuda.waits import recorded_waits

WAITS = {
    "item": ("read", lambda x: x[0].item()),
    "bool": ("read", lambda x: bool(x[0])),
    "index": ("read", lambda x: [10, 20, 30, 40][x[0].long()]),
    "0-dim index": ("read", lambda x: x[x[0].long()]),
    "equal": ("read", lambda x: torch.equal(x, x + 1)),
    "nonzero": ("read", lambda x: x.nonzero()),
    "mask": ("read", lambda x: x[x > 1]),
    "mask assignment": ("read", lambda x: x.clone().__setitem__(x > 1, torch.ones_like(x[:2]))),
    "mask of bytes": ("read", lambda x: x.clone().index_put_(((x > 1).byte(),), x[:2] + 1)),
    "masked_select": ("read", lambda x: x.masked_select(x > 1)),
    "unique": ("read", lambda x: x.unique()),
    "unique rows": ("read", lambda x: x.unique(dim=0)),
    "_unique": ("read", lambda x: torch._unique(x)),
    "unique_consecutive": ("read", lambda x: x.unique_consecutive()),
    "unique_consecutive rows": ("read", lambda x: x.unique_consecutive(dim=0)),
    "histc": ("read", lambda x: x.histc(3)),
    "allclose": ("read", lambda x: torch.allclose(x, x + 1)),
    "is_nonzero": ("read", lambda x: torch.is_nonzero(x[0])),
    "bincount": ("read", lambda x: x.long().bincount()),
    "multinomial": ("read", lambda x: x.multinomial(1)),
    "repeat_interleave": ("read", lambda x: x.repeat_interleave(x.long())),
    "isin by sorting": ("read", lambda x: torch.isin(x, x.repeat(20))),
    "tolist": ("copy", lambda x: x.tolist()),
    "cpu": ("copy", lambda x: x.cpu()),
    "copy_": ("copy", lambda x: torch.empty(3, pin_memory=True).copy_(x)),
    "tensor": ("copy", lambda x: torch.tensor([1, 2], device="cuda")),
    "indices of the host": ("copy", lambda x: x[torch.tensor([0, 2])]),
    "from pinned memory": ("copy", lambda x: torch.ones(3).pin_memory().to("cuda")),
    "stream": ("synchronize", lambda x: torch.cuda.current_stream().synchronize()),
}
WAITS_UNNOTICED = {
    "pageable source": ("silent", lambda x: torch.ones(3).to("cuda", non_blocking=True)),
    "pageable target": ("silent", lambda x: torch.empty(3).copy_(x, non_blocking=True)),
    "converted on the host": (
        "silent",
        lambda x: x.clone().copy_(torch.arange(3).pin_memory(), non_blocking=True),
    ),
    "repeated on the host": (
        "silent",
        lambda x: x.new_empty(2, 3).copy_(torch.ones(3).pin_memory(), non_blocking=True),
    ),
    "mask of the host": ("silent", lambda x: x[torch.tensor([True, False, True])]),
    "event": ("synchronize", lambda x: recorded_event().synchronize()),
    "device": ("synchronize", lambda x: torch.cuda.synchronize()),
}
FREE = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0).topk(2).indices.sort(),
    "index": lambda x: x[x.long().clamp(0, 2)],
    "isin": lambda x: torch.isin(x, x[:2]),
    "isin of distinct values": lambda x: torch.isin(x, x.repeat(20), assume_unique=True),
    "sizes given": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "pinned": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "to pinned": lambda x: x.to("cpu", non_blocking=True),
    "converted on the device": lambda x: torch.empty(3, dtype=torch.float64, pin_memory=True).copy_(
        x, non_blocking=True
    ),
    "nothing": lambda x: torch.ones(0).to("cuda"),
    "full": lambda x: torch.full((3,), 7, device="cuda"),
    "arange": lambda x: torch.arange(3, device="cuda"),
    "event": lambda x: recorded_event().query(),
}


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture
def sync_debug_mode():
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


class TestWaits:
    @pytest.mark.parametrize("name", WAITS)
    def test_noticed_by_torch(self, name: str, sync_debug_mode) -> None:
        kind, operation = WAITS[name]
        x = on_device(1, 2, 3)
        with recorded_waits() as waits:
            operation(x)
        assert kind in kinds(waits)
        assert any(frame.filename == __file__ for frame in waits[0].stack)
        sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            operation(x)
        sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            operation(x)

    @pytest.mark.parametrize("name", WAITS_UNNOTICED)
    def test_unnoticed_by_torch(self, name: str, sync_debug_mode) -> None:
        kind, operation = WAITS_UNNOTICED[name]
        x = on_device(1, 2, 3)
        sync_debug_mode("error")
        with recorded_waits() as waits:
            operation(x)
        assert kinds(waits) == [kind]

    @pytest.mark.parametrize("name", FREE)
    def test_none(self, name: str, sync_debug_mode) -> None:
        x = on_device(1, 2, 3)
        sync_debug_mode("error")
        with recorded_waits() as waits, warnings.catch_warnings():
            warnings.simplefilter("error")
            FREE[name](x)
        assert waits == []
