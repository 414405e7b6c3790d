# SPDX-License-Identifier: Apache-2.0
"""The simulated device is as strict as CUDA: each test breaks one of its rules."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.simcuda.tensors import kinds, on_device
from tests.simcuda.waits import recorded_waits
from tests.support.triton_product import product


def test_computes_as_the_host_does() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    expected = F.softmax(F.conv2d(x, weight).flatten(1), dim=-1).topk(5)
    given = F.softmax(F.conv2d(x.cuda(), weight.cuda()).flatten(1), dim=-1).topk(5)
    assert given.values.device == given.indices.device == torch.device("cuda:0")
    assert torch.equal(given.indices.cpu(), expected.indices)
    assert torch.equal(given.values.cpu(), expected.values)


def test_views_and_in_place_operators_reach_the_same_memory() -> None:
    x = torch.zeros(4, 4, device="cuda")
    x[1:3].t()[0].add_(5)
    x.unbind(0)[3].copy_(torch.ones(4, device="cuda"))
    torch.add(x[0], 7, out=x[2])
    assert x.tolist() == [[0] * 4, [5, 0, 0, 0], [7] * 4, [1] * 4]
    with torch.inference_mode():
        y = torch.zeros(3, device="cuda")
        y[:2].fill_(1)
        assert y.tolist() == [1, 1, 0]


class TestDevicesDoNotMix:
    @pytest.mark.parametrize(
        "operation",
        [
            lambda x, host: x + host,
            lambda x, host: host + x,
            lambda x, host: x.mul_(host),
            lambda x, host: torch.cat([x, host]),
            lambda x, host: torch.where(x > 0, x, host),
            lambda x, host: x @ host,
            lambda x, host: x.gather(0, host.long()),
            lambda x, host: x.index_select(0, host.long()),
            lambda x, host: F.embedding(host.long(), x[:, None]),
            lambda x, host: torch.isin(x, host),
            lambda x, host: torch.add(x, 1, out=host),
        ],
    )
    def test_with_tensors_of_the_host(self, operation) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            operation(on_device(1, 2, 0), torch.zeros(3))

    def test_a_device_number_and_a_host_tensor(self) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(3) + torch.ones((), device="cuda")

    def test_numbers_of_the_host_where_cuda_takes_them(self) -> None:
        x, two = on_device(1, 2), torch.tensor(2.0)
        assert (x * two).tolist() == [2, 4]
        assert (x // 2).tolist() == [0, 1]  # torch makes a tensor of Python's number
        assert torch.where(x > 1, two, x).tolist() == [1, 2]
        assert x.masked_fill(x > 1, two + 3).tolist() == [1, 5]
        assert x.clone().masked_fill_(x > 1, two + 3).tolist() == [1, 5]
        assert x.clone().fill_(two).tolist() == [2, 2]
        index = on_device(1, dtype=torch.int64)
        assert x.index_fill(0, index, two + 4).tolist() == [1, 6]
        assert x.clone().index_fill_(0, index, two + 4).tolist() == [1, 6]
        assert x.clone().index_put_((index,), two + 4).tolist() == [1, 6]

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x, number: torch.stack([x[0], number]),
            lambda x, number: number.add_(x[0]),
            lambda x, number: x.scatter(0, torch.zeros(1, dtype=torch.int64), number),
            lambda x, number: torch.isin(x, number),
        ],
    )
    def test_numbers_of_the_host_where_cuda_does_not(self, operation) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            operation(on_device(1, 2), torch.tensor(2.0))

    def test_generator_of_the_host(self) -> None:
        with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
            torch.rand(3, device="cuda", generator=torch.Generator("cpu"))
        drawn = [
            torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).tolist()
            for _ in range(2)
        ]
        assert drawn[0] == drawn[1]

    def test_storage_of_the_host(self) -> None:
        with pytest.raises(RuntimeError, match="storage on different device"):
            on_device(1, 2).set_(torch.ones(2).untyped_storage(), 0, (2,), (1,))

    def test_numpy(self) -> None:
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            np.asarray(on_device(1))


class TestPinning:
    def test_device_tensors(self) -> None:
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            on_device(1, 2).pin_memory()
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(2, device="cuda", pin_memory=True)
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty_strided((2,), (1,), device="cuda", pin_memory=True)

    def test_numbers_made_while_the_device_is_the_default(self) -> None:
        """vLLM loads models so: a bare `torch.tensor` is on the device then."""
        with (
            torch.device("cuda"),
            pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"),
        ):
            torch.as_tensor([1, 2]).pin_memory()

    def test_views_that_repeat_elements(self) -> None:
        with pytest.raises(RuntimeError, match="more than one element"):
            torch.arange(3)[:, None].expand(-1, 3).pin_memory()

    def test_views_with_gaps(self) -> None:
        """CUDA pins their elements; copies from such memory may wait."""
        gapped = torch.arange(6).view(2, 3).t()[::2].pin_memory()
        assert gapped.is_pinned()
        with recorded_waits() as waits:
            assert gapped.t().contiguous().pin_memory().cuda(non_blocking=True) is not None
            assert kinds(waits) == []
            gapped.cuda(non_blocking=True)
        assert kinds(waits) == ["silent"]

    def test_memory_behind_a_pinned_tensor(self) -> None:
        pinned = torch.ones(64).pin_memory()
        behind = (ctypes.c_float * 1).from_address(pinned.data_ptr() + pinned.nbytes)
        assert pinned[-1:].is_pinned()
        assert not torch.frombuffer(behind, dtype=torch.float32).is_pinned()

    def test_the_device_sees_pinned_memory_alone(self) -> None:
        with pytest.raises(RuntimeError, match="pinned memory of the host alone"):
            torch.ops._C.get_cuda_view_from_cpu_tensor(torch.ones(3))


class TestTypes:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
    @pytest.mark.parametrize(
        "product",
        [
            lambda x: x @ x,
            lambda x: x[None] @ x[None],
            lambda x: x @ x[0],
            lambda x: torch.einsum("ij,jk->ik", x, x),
            lambda x: x[0].dot(x[0]),
            lambda x: x[0].vdot(x[0]),
            lambda x: F.linear(x, x),
            lambda x: F.linear(x, x, x[0]),
            lambda x: torch.addmv(x[0], x, x[0]),
            lambda x: torch.baddbmm(x[None], x[None], x[None]),
            lambda x: torch.addbmm(x, x[None], x[None]),
            lambda x: F.conv2d(x[None, None], x[None, None]),
        ],
    )
    def test_integer_products(self, product, dtype: torch.dtype) -> None:
        with pytest.raises(RuntimeError, match='_cuda" not implemented for'):
            product(torch.ones(2, 2, device="cuda", dtype=dtype))

    def test_products_of_two_types(self) -> None:
        x = torch.ones(1, 2, 2, device="cuda")
        with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
            torch.bmm(x, x.double())

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x: F.avg_pool2d(x.long(), 2),
            lambda x: F.avg_pool3d(x.long(), (1, 2, 2)),
            lambda x: F.interpolate(x.byte(), size=(2, 2), mode="bilinear"),
            lambda x: F.interpolate(x.byte(), size=(2, 2), mode="bicubic"),
            lambda x: F.interpolate(x.byte(), size=(2, 2), mode="bilinear", antialias=True),
            lambda x: F.interpolate(x.byte(), size=(2, 2), mode="bicubic", antialias=True),
        ],
    )
    def test_integers_where_only_the_cpu_takes_them(self, operation) -> None:
        operation(torch.ones(1, 1, 4, 4))
        with pytest.raises(RuntimeError, match='_cuda" not implemented for'):
            operation(torch.ones(1, 1, 4, 4, device="cuda"))


class TestCopiesInFlight:
    @pytest.mark.parametrize("wait", ["event", "stream", "device", "read", "copy", "silent copy"])
    def test_to_the_host_hold_nonsense_until_waited_for(self, wait: str) -> None:
        x = on_device(1, 2, 3)
        copy = x.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        assert copy.is_pinned()
        assert copy.isnan().all()
        {
            "event": event.synchronize,
            "stream": torch.cuda.current_stream().synchronize,
            "device": torch.cuda.synchronize,
            "read": lambda: x[0].item(),
            "copy": lambda: torch.ones(3).to("cuda"),
            "silent copy": lambda: torch.empty(3).copy_(x, non_blocking=True),
        }[wait]()
        assert copy.tolist() == [1, 2, 3]

    def test_an_event_tells_when_they_are_there(self) -> None:
        numbers = on_device(4, 5, dtype=torch.int64)
        copy = torch.empty(2, dtype=torch.int64, pin_memory=True).copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        assert (copy > 2**62).all()
        while not event.query():
            pass
        assert copy.tolist() == [4, 5]

    def test_an_earlier_event_is_not_enough(self) -> None:
        x, event = on_device(1), torch.cuda.Event()
        event.record()
        copy = x.to("cpu", non_blocking=True)
        event.synchronize()
        assert copy.isnan().all()
        event.record()
        later = x.to("cpu", non_blocking=True)
        while not event.query():
            pass
        assert copy.tolist() == [1]
        assert later.isnan().all()

    def test_a_copy_from_pageable_memory_waits_for_no_other(self) -> None:
        copy = on_device(1).to("cpu", non_blocking=True)
        torch.ones(3).to("cuda", non_blocking=True)
        assert copy.isnan().all()
        assert not torch.cuda.current_stream().query()

    def test_time_between_events_that_are_not_done(self) -> None:
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        second.record()
        with pytest.raises(RuntimeError, match="device not ready"):
            first.elapsed_time(second)
        second.synchronize()
        assert first.elapsed_time(second) > 0

    def test_a_pinned_source_that_is_overwritten(self) -> None:
        source = torch.ones(3).pin_memory()
        source.to("cuda", non_blocking=True)
        source[1] = 7
        with pytest.raises(RuntimeError, match="overwritten before the device had read it"):
            torch.cuda.synchronize()

    @pytest.mark.parametrize("reader", ["copy", "operator", "kernel"])
    def test_pinned_memory_that_the_device_reads_in_place(self, reader: str) -> None:
        """vLLM's second runner fills pools of such memory, and takes them in turn."""
        pinned = torch.ones(16, 16).pin_memory()
        in_place = torch.ops._C.get_cuda_view_from_cpu_tensor(pinned)
        x = torch.ones(16, 16, device="cuda")

        def read() -> None:
            with torch.device("cuda"):
                {
                    "copy": lambda: x.copy_(in_place, non_blocking=True),
                    "operator": lambda: in_place + 1,
                    "kernel": lambda: product(in_place, x),
                }[reader]()

        part = in_place[:8]  # a view reads nothing
        pinned.fill_(5)
        assert part[0, 0].item() == 5
        read()
        in_place.add_(1)  # in order: the device does this after it has read
        torch.cuda.synchronize()
        pinned.fill_(2)
        read()
        pinned.fill_(3)
        with pytest.raises(RuntimeError, match="overwritten before the device had read it"):
            torch.cuda.synchronize()

    @pytest.mark.parametrize("writer", ["copy", "operator", "kernel"])
    def test_pinned_memory_that_the_device_writes_in_place(self, writer: str) -> None:
        """In order, that is no overwriting; but it must not hide one by the host before it."""
        pinned = torch.ones(16, 16).pin_memory()
        in_place = torch.ops._C.get_cuda_view_from_cpu_tensor(pinned)
        x = torch.full((16, 16), 2.0, device="cuda")

        def write() -> None:
            with torch.device("cuda"):
                {
                    "copy": lambda: in_place.copy_(x),
                    "operator": lambda: in_place.add_(x),
                    "kernel": lambda: product(in_place, x),  # it may write what it is given
                }[writer]()

        pinned.to("cuda", non_blocking=True)
        write()
        torch.cuda.synchronize()
        pinned.to("cuda", non_blocking=True)
        pinned.fill_(7)
        with pytest.raises(RuntimeError, match="overwritten before the device had read it"):
            write()
        with pytest.raises(RuntimeError, match="overwritten before the device had read it"):
            torch.cuda.synchronize()

    def test_pinned_memory_that_is_read_with_gaps(self) -> None:
        pinned = torch.ones(4, 4).pin_memory()
        torch.ops._C.get_cuda_view_from_cpu_tensor(pinned)[::3] + 1
        pinned[3] = 7
        with pytest.raises(RuntimeError, match="overwritten before the device had read it"):
            torch.cuda.synchronize()

    def test_a_pinned_source_that_is_waited_for(self) -> None:
        source = torch.ones(3).pin_memory()
        copied = source.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        source[1] = 7
        assert copied.tolist() == [1, 1, 1]

    def test_a_pinned_source_that_nobody_holds(self) -> None:
        """Its memory is not used again before the copy is done."""
        copied = torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
        torch.full((1000,), 2.0).pin_memory()
        torch.cuda.synchronize()
        assert copied.sum().item() == 1000


def test_fresh_memory_is_nonsense() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.empty(3, device="cuda", dtype=dtype).isnan().all()
        assert torch.empty(3, pin_memory=True, dtype=dtype).isnan().all()
    indices = torch.empty(3, device="cuda", dtype=torch.int64)
    with pytest.raises(IndexError):
        torch.zeros(1000, device="cuda")[indices]


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4 * 2**20
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4 * 2**20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


class TestTriton:
    def test_kernels_write_the_device_tensors(self) -> None:
        a, b = (torch.randn(16, 16, device="cuda") for _ in range(2))
        with torch.device("cuda"):
            given = product(a, b)
        torch.testing.assert_close(given, a @ b)

    def test_a_pointer_of_the_host(self) -> None:
        a = torch.randn(16, 16, device="cuda")
        with (
            torch.device("cuda"),
            pytest.raises(ValueError, match="cannot be accessed from Triton"),
        ):
            product(a, torch.randn(16, 16, device="cpu"))

    def test_pinned_memory_of_the_host(self) -> None:
        a, b = torch.randn(16, 16, device="cuda"), torch.randn(16, 16).pin_memory()
        with torch.device("cuda"):
            given = product(a, b)
        torch.testing.assert_close(given, a @ b.cuda())
