# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.commands.chosen_methods import parse_methods
from anchorprune_vllm.methods import registry


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["anchorprune"], ["anchorprune"]),
        (["anchorprune:tau=0.1,patience=2"], ["anchorprune:patience=2,tau=0.1"]),
        (["anchorprune:tau=0.1,anchorprune"], ["anchorprune:tau=0.1", "anchorprune"]),
        (
            ["anchorprune:tau=0.1,patience=2,anchorprune:tau=0.3", "anchorprune"],
            ["anchorprune:patience=2,tau=0.1", "anchorprune:tau=0.3", "anchorprune"],
        ),
        # The same thing is not run twice.
        (["anchorprune", "anchorprune"], ["anchorprune"]),
        (
            ["anchorprune:tau=0.1,patience=2", "anchorprune:patience=2,tau=0.1"],
            ["anchorprune:patience=2,tau=0.1"],
        ),
        (["all"], list(registry.names())),
    ],
)
def test_methods(texts: list[str], labels: list[str]) -> None:
    methods = parse_methods(texts)
    assert [str(method) for method in methods] == labels
    assert parse_methods(labels) == methods


def test_options_have_their_types() -> None:
    (method,) = parse_methods(["anchorprune:tau=0.1,patience=2,min_anchor=null"])
    config = PruneConfig.from_dict({"budget": 8, **method.settings()})
    anchor = config.anchor
    assert (anchor.tau, anchor.patience, anchor.min_anchor) == (0.1, 2, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("anchorprune", "anchorprune:similarity=raw"),
        ("anchorprune:tau=0.1", "anchorprune:similarity=raw,tau=0.1"),
        ("anchorprune:similarity=negated", "anchorprune:similarity=negated"),  # its own comes first
        ("cdpruner", "cdpruner:similarity=raw"),
        ("divprune", "divprune"),  # does not look at the question
    ],
)
def test_defaults_are_for_methods_that_look_at_the_question(given: str, expected: str) -> None:
    (method,) = parse_methods([given])
    with_defaults = method.with_defaults({"similarity": "raw"})
    assert str(with_defaults) == expected
    assert [with_defaults] == parse_methods([expected])
    assert method.with_defaults({}) == method


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anchorprun", "method must be one of anchorprune"),
        ("", "method must be one of"),
        ("anchorprune:tua=0.1", "unknown setting 'tua' (did you mean 'tau'?)"),
        ("anchorprune:tau=5", "tau must be a number from 0 to 2, got 5"),
        ("anchorprune:tau=low", "tau must be a number from 0 to 2, got 'low'"),
        ("anchorprune:tau", "option 'tau' is not of the form key=value"),
        ("anchorprune:tau=", "option 'tau=' is not of the form key=value"),
        (
            "anchorprune:budget=5",
            "budget is no option of a method; commands that can set it have --budgets",
        ),
        ("anchorprune:positions=native", "commands that can set it have --positions"),
        ("tau=0.1", "an option needs a method before it"),
    ],
)
def test_wrong_methods(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse_methods([text])
    assert words in str(error.value)
