# SPDX-License-Identifier: Apache-2.0
"""The input and output of selection, and the checks of its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import reads_are_free


class Candidates(NamedTuple):
    """The tokens of one image or video, with the signals that decide between them.

    Tensors may have any float dtype and must be on one device. The host reads `units`, so give it
    as a CPU tensor: a device tensor costs a synchronisation.

    A method that does not need `features` gets the tower's rows in their place, and a method that
    does not need `importance` gets an empty tensor. `projected`, `keys` and `object_attention` are
    None for methods that do not ask for them.
    """

    relevance: Tensor | None  # [N], larger is more relevant; None without a query: no anchor
    features: Tensor  # [N, D1], for novelty in Stage 1
    importance: Tensor  # [N], not negative
    budget: int  # K; all tokens are kept if it is N or more
    context_features: Tensor | None = None  # [N, D2], for novelty in Stage 2; default: features
    units: Tensor | None = None  # [N] int, non-decreasing: unit of each token; default: one unit
    projected: Tensor | None = None  # [N, H], the rows that the language model would get
    keys: Tensor | None = None  # [N, heads, head size], from the tower's attention
    object_attention: Tensor | None = None  # [N], attention received in a middle layer
    grids: Sequence[tuple[int, int]] = ()  # rows and columns of each unit
    seed: int = 0  # a number that belongs to this media, always the same

    @property
    def kept(self) -> int:
        """Return K, which is the budget, or the number of tokens if that is smaller."""
        return min(self.budget, len(self.features))

    @property
    def context(self) -> Tensor:
        """Return the features for Stage 2, [N, D2]."""
        return self.features if self.context_features is None else self.context_features


class KeptTokens(NamedTuple):
    """The tokens kept of one item, in the order in which the language model gets them.

    AnchorPrune keeps tokens unchanged, in native order. Methods that merge tokens give `weights`: a
    row is then a weighted sum of tokens, at the position of the token with its index.
    """

    indices: Tensor  # [K] int64, distinct
    is_anchor: Tensor  # [K] bool: which of them are the protected anchor
    weights: Tensor | None = None  # [K, N]; None if each row is the token with its index

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the kept rows [K, D] of an item's tokens [N, D]."""
        if self.weights is None:
            return tokens[self.indices]
        return (self.weights.float() @ tokens.float()).to(tokens.dtype)


def validate(item: Candidates, where: str = "") -> None:
    """Raise ValueError for an item that is not as `anchor_prune` describes it."""
    for problem in _problems(item):
        raise ValueError(where + problem)


def _problems(item: Candidates) -> Iterator[str]:
    signals = {
        "features": item.features,
        "importance": item.importance,
        "relevance": item.relevance,
        "context_features": item.context_features,
    }
    for name, tensor in {**signals, "units": item.units}.items():
        optional = name not in ("features", "importance")
        if not isinstance(tensor, Tensor) and not (tensor is None and optional):
            allowed = "a torch.Tensor or None" if optional else "a torch.Tensor"
            yield f"{name} is a {type(tensor).__name__}; give {allowed}."
    if item.features.ndim != 2 or 0 in item.features.shape:
        yield f"features has shape {list(item.features.shape)}; give [N, D], neither of them 0."
    tokens = len(item.features)
    for name, tensor in signals.items():
        if tensor is None:
            continue
        dimensions = 2 if "features" in name else 1
        if tensor.ndim != dimensions or len(tensor) != tokens or 0 in tensor.shape:
            wanted = f"[{tokens}, D]" if dimensions == 2 else f"[{tokens}]"
            yield f"{name} has shape {list(tensor.shape)}; give {wanted}, a row for each token."
        if not tensor.dtype.is_floating_point:
            yield f"{name} has dtype {tensor.dtype}; give a float dtype."
        if tensor.device != item.features.device:
            yield (
                f"{name} is on {tensor.device} and features on {item.features.device}; "
                "give them on one device."
            )
        if reads_are_free(tensor) and not bool(tensor.isfinite().all()):
            yield f"{name} has values that are NaN or infinite; give finite ones."
        if name == "importance" and reads_are_free(tensor) and bool((tensor < 0).any()):
            yield f"importance has values below 0, such as {float(tensor.min()):g}; give 0 or more."
    if not _is_count(item.budget):
        yield f"budget is {item.budget!r}; give a whole number of tokens, 1 or more."
    if item.units is not None:
        yield from _unit_problems(item.units, tokens)


def _unit_problems(units: Tensor, tokens: int) -> Iterator[str]:
    if units.shape != (tokens,):
        yield f"units has shape {list(units.shape)}; give [{tokens}], the unit of each token."
    if units.dtype.is_floating_point or units.dtype.is_complex or units.dtype == torch.bool:
        yield f"units has dtype {units.dtype}; give an integer dtype."
    numbers = units.tolist()
    for place, (one, following) in enumerate(pairwise(numbers)):
        if following < one:
            yield (
                f"units falls from {one} to {following} at token {place + 1}; give it "
                "non-decreasing, the tokens of a unit in one run."
            )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1  # not a bool
