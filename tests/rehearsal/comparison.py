# SPDX-License-Identifier: Apache-2.0
"""What holds for every engine on simulated CUDA."""

from __future__ import annotations

from dataclasses import dataclass

from tests.rehearsal.report import Answer, EngineReport, HostWait

LOGPROB_TOLERANCE = 1e-3  # of float32: kernels add in another order
RUNNERS = {
    "V1": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "V2": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
WAITS_OF_OURS = {
    "anchorprune_vllm/worker/positions.py:place_media": (
        "native positions: the first runner keeps positions on the host, and those of kept tokens "
        "come from the device"
    ),
}
"""Where our code may wait for the device outside the encoder, on the first runner, and why."""


@dataclass(frozen=True)
class Rehearsal:
    """The same engine on both platforms."""

    on_cpu: EngineReport
    on_cuda: EngineReport

    def check_platform(self, runner: str) -> None:
        """It was vLLM's own GPU worker and runner, on the device."""
        assert (self.on_cpu.platform, self.on_cuda.platform) == ("cpu", "cuda")
        assert self.on_cuda.worker == "vllm.v1.worker.gpu_worker.Worker"
        assert self.on_cuda.runner == RUNNERS[runner]
        assert self.on_cuda.device == "cuda:0"

    def check_answers(self) -> None:
        """They equal those of the CPU platform."""
        assert self.on_cuda.answers.keys() == self.on_cpu.answers.keys()
        for step, expected in self.on_cpu.answers.items():
            for number, (given, wanted) in enumerate(
                zip(self.on_cuda.answers[step], expected, strict=True)
            ):
                assert are_equal(given, wanted), f"{step}, request {number}: {given}, not {wanted}"

    def equal_answers(self) -> tuple[int, int]:
        """How many are equal, and how many there are."""
        pairs = [
            pair
            for step, expected in self.on_cpu.answers.items()
            for pair in zip(self.on_cuda.answers[step], expected, strict=True)
        ]
        return sum(are_equal(*pair) for pair in pairs), len(pairs)

    def waits_of_ours(self, *, in_encoder: bool) -> list[HostWait]:
        """Those of our code, while requests ran."""
        return [w for w in self.on_cuda.waits if w.is_ours and w.in_encoder == in_encoder]

    def check_waits(self, *, is_native: bool = False) -> None:
        """None of ours between tower and language model, elsewhere exactly those of the list.

        They happen with native positions on the first runner. On the second, and with compact
        positions, there are none at all.
        """
        assert self.on_cuda.waits, "vLLM itself waits for its samples: recording must have worked"
        assert self.waits_of_ours(in_encoder=True) == []
        is_listed = is_native and self.on_cuda.runner == RUNNERS["V1"]
        allowed = set(WAITS_OF_OURS) if is_listed else set()
        others = self.waits_of_ours(in_encoder=False)
        assert [wait for wait in others if wait.where not in allowed] == []
        stale = allowed - {wait.where for wait in others}
        assert not stale, f"remove {stale} from WAITS_OF_OURS: our code no longer waits there"

    def check_compilation(self) -> None:
        """All kernels are there before the first request: with `--jit-monitor-mode=error` one that
        is compiled later ends the engine.
        """
        assert any(kernel.startswith("choose(") for kernel in self.on_cuda.kernels)
        assert self.on_cuda.late_kernels == []

    def check_metrics(self) -> None:
        """What the device counts comes with the next call; the rest is there at once."""
        late = {"selections", "anchors count", "anchors sum"}
        before, after = self.on_cpu.metrics
        expected = {name: (before if name in late else after)[name] for name in after}
        assert self.on_cuda.metrics[-1] == expected
        assert before["selections"] > 0


def are_equal(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and all(
        abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )
