# SPDX-License-Identifier: Apache-2.0
"""Whether a warm answer is the cold one."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from tests.support.asking import TOLERANCE

Verdict = Literal["equal", "near-tie", "different"]


class Precision(NamedTuple):
    """How far apart the same logprob may be, computed alone and in a batch."""

    tolerance: float
    near_tie: float
    """Two tokens whose logprobs are no further apart may take each other's place."""


FLOAT32 = Precision(TOLERANCE, TOLERANCE)
BFLOAT16 = Precision(0.15, 0.125)
"""Logits between 4 and 8 are rounded to multiples of 1/32, and layers before them round as well: in
2,000 requests to Qwen3.5, of which the tower gave the same rows and the pruner kept the same tokens
each time, logprobs were up to 0.11 apart, and tokens that changed places up to 0.06."""


class Scored(NamedTuple):
    """A greedy answer with the two best tokens at each place."""

    prompt: int
    tokens: list[int]
    best: list[dict[int, float]]
    """Logprobs of the two best tokens."""

    @classmethod
    def of(cls, output: Any) -> Scored:
        """Take it from what vLLM returns."""
        (answer,) = output.outputs
        best = [{token: each.logprob for token, each in step.items()} for step in answer.logprobs]
        return cls(len(output.prompt_token_ids), list(answer.token_ids), best)


def compare(cold: Scored, warm: Scored, precision: Precision) -> Verdict:
    """Compare up to the first token of which precision cannot say which is the better one."""
    if (cold.prompt, len(cold.tokens)) != (warm.prompt, len(warm.tokens)):
        return "different"
    for token, other, best, others in zip(
        cold.tokens, warm.tokens, cold.best, warm.best, strict=True
    ):
        if token != other:
            # What follows was asked with another beginning.
            is_tie = other in best and best[token] - best[other] <= precision.near_tie
            return "near-tie" if is_tie else "different"
        if abs(best[token] - others[token]) > precision.tolerance:
            return "different"
    return "equal"
