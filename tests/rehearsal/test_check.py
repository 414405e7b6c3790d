# SPDX-License-Identifier: Apache-2.0
"""`anchorprune check` on the simulated device, without servers and times."""

from __future__ import annotations

import torch

from anchorprune_vllm.commands.bench.measure import this_device
from anchorprune_vllm.commands.check import kernels

SIZES = ((1, 8), (40, 16), (130, 32))


def test_kernels_are_right() -> None:
    device = this_device()
    assert device.type == "cuda"
    findings = [
        *kernels.check_choices(device, SIZES),
        *kernels.check_received_attention(device),
        *kernels.check_waits(device),
    ]
    assert [(finding.name, finding.status) for finding in findings] == [
        ("anchors", "ok"),
        ("expansion", "ok"),
        ("batches", "ok"),
        ("received attention", "ok"),
        ("host waits", "ok"),
    ], findings


def test_a_wait_is_found(monkeypatch) -> None:
    def waits(items: list, params: object) -> None:
        items[0].features.sum().item()

    monkeypatch.setattr(kernels, "select_batch", waits)
    (finding,) = kernels.check_waits(torch.device("cuda"))
    assert finding.status == "FAILED"
    assert torch.cuda.get_sync_debug_mode() == 0
