# SPDX-License-Identifier: Apache-2.0
"""Every refusal says what was given and what is allowed."""

import pytest
import torch

from anchorprune_vllm.selection import (
    AnchorParams,
    Candidates,
    anchor_prune,
    anchor_prune_batch,
)

GOOD = Candidates(
    relevance=torch.rand(6),
    features=torch.rand(6, 4),
    importance=torch.rand(6),
    budget=3,
    context_features=torch.rand(6, 5),
    units=torch.tensor([0, 0, 0, 1, 1, 1]),
)
NAN = torch.full((6,), torch.nan)

CASES = [
    ("features", torch.rand(6), "features has shape [6]; give [N, D], neither of them 0."),
    ("features", torch.rand(0, 4), "features has shape [0, 4]; give [N, D], neither of them 0."),
    ("features", torch.rand(6, 0), "features has shape [6, 0]; give [N, D], neither of them 0."),
    ("features", None, "features is a NoneType; give a torch.Tensor."),
    ("features", torch.ones(6, 4).long(), "features has dtype torch.int64; give a float dtype."),
    ("features", torch.full((6, 4), torch.inf), "features has values that are NaN or infinite;"),
    ("importance", torch.rand(5), "importance has shape [5]; give [6], a row for each token."),
    (
        "importance",
        torch.rand(6, 1),
        "importance has shape [6, 1]; give [6], a row for each token.",
    ),
    ("importance", torch.tensor(1.0), "importance has shape []; give [6], a row for each token."),
    ("importance", [1.0] * 6, "importance is a list; give a torch.Tensor."),
    (
        "importance",
        torch.arange(6) - 1.5,
        "importance has values below 0, such as -1.5; give 0 or more.",
    ),
    ("importance", NAN, "importance has values that are NaN or infinite; give finite ones."),
    ("relevance", torch.rand(7), "relevance has shape [7]; give [6], a row for each token."),
    ("relevance", [1.0] * 6, "relevance is a list; give a torch.Tensor or None."),
    ("relevance", torch.ones(6).int(), "relevance has dtype torch.int32; give a float dtype."),
    ("relevance", -NAN, "relevance has values that are NaN or infinite; give finite ones."),
    ("relevance", torch.rand(6, device="meta"), "relevance is on meta and features on cpu; give"),
    ("context_features", torch.rand(6), "context_features has shape [6]; give [6, D], a row for"),
    ("context_features", torch.rand(5, 4), "context_features has shape [5, 4]; give [6, D], a row"),
    ("context_features", NAN[:, None], "context_features has values that are NaN or infinite;"),
    ("budget", 0, "budget is 0; give a whole number of tokens, 1 or more."),
    ("budget", -3, "budget is -3; give a whole number of tokens, 1 or more."),
    ("budget", 2.0, "budget is 2.0; give a whole number of tokens, 1 or more."),
    ("budget", True, "budget is True; give a whole number of tokens, 1 or more."),
    ("budget", "10%", "budget is '10%'; give a whole number of tokens, 1 or more."),
    ("units", torch.zeros(5).int(), "units has shape [5]; give [6], the unit of each token."),
    ("units", torch.zeros(6), "units has dtype torch.float32; give an integer dtype."),
    ("units", torch.zeros(6).bool(), "units has dtype torch.bool; give an integer dtype."),
    ("units", [0] * 6, "units is a list; give a torch.Tensor or None."),
    (
        "units",
        torch.tensor([0, 0, 2, 2, 1, 2]),
        "units falls from 2 to 1 at token 4; give it non-decreasing, the tokens of a unit in one",
    ),
]


def test_items(subtests):
    for name, value, words in CASES:
        with subtests.test(name=name, words=words):
            bad = GOOD._replace(**{name: value})
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                anchor_prune(*bad[:6])
            assert str(refused.value).startswith(words)
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                anchor_prune_batch([GOOD, bad])
            assert str(refused.value).startswith("item 1: " + words)


PARAMS = [
    ("min_anchor", (0, -1, 1.0, True, "1"), "a whole number of at least 1"),
    ("tau", (-0.1, 2.1, torch.nan, torch.inf, "0.2", None, True), "a number from 0 to 2"),
    ("patience", (0, -1, 1.5, True, None), "a whole number of at least 1"),
    (
        "max_anchor_ratio",
        (0, -1.0, 1.01, torch.nan, "1", None),
        "a number above 0 and up to 1",
    ),
]


def test_parameters(subtests):
    rows = [(name, value, words) for name, values, words in PARAMS for value in values]
    for name, value, words in rows:
        with subtests.test(name=name, value=value):
            for refuse in (
                lambda **params: anchor_prune(*GOOD[:6], **params),
                lambda **params: anchor_prune_batch([GOOD], **params),
                AnchorParams,
            ):
                with pytest.raises(ValueError) as refused:  # noqa: PT011
                    refuse(**{name: value})
                assert str(refused.value) == f"anchorprune: {name} must be {words}, got {value!r}"


def test_the_ends_of_what_is_allowed(subtests):
    for params in (
        {"min_anchor": 1},
        {"tau": 0},
        {"tau": 2},
        {"patience": 1},
        {"max_anchor_ratio": 1},
    ):
        with subtests.test(params=params):
            assert len(anchor_prune(*GOOD[:6], **params).indices) == 3


def test_items_of_a_batch_go_together(subtests):
    for other, words in (
        (GOOD._replace(features=torch.rand(6, 3)), "size D1: 3, 4"),
        (GOOD._replace(context_features=None), "size D2: 4, 5"),
        (
            Candidates(None, *(torch.rand(*s, device="meta") for s in [(6, 4), (6,)]), budget=3),
            "device: cpu, meta",
        ),
    ):
        with subtests.test(words=words):
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                anchor_prune_batch([GOOD, other])
            assert str(refused.value) == (
                f"The items have features of different {words}; give them in separate batches."
            )


def test_a_device_tensor_is_not_read():
    """`isfinite` on a device would make the host wait; the meta device cannot be read at all."""
    tensors = [torch.rand(*shape, device="meta") for shape in [(6,), (6, 4), (6,)]]
    assert anchor_prune(*tensors, 3, units=GOOD.units).indices.shape == (3,)


def test_the_papers_defaults():
    assert AnchorParams() == AnchorParams(None, 0.2, 3, 0.5)
