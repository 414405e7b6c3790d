# SPDX-License-Identifier: Apache-2.0
"""Methods as they are chosen on the command line: `NAME` or `NAME:key=value,key=value`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.checks import check_choice
from anchorprune_vllm.config import SETTINGS, PruneConfig
from anchorprune_vllm.methods import registry

_FLAGS = {
    "budget": "--budgets",
    "video_budget": "--budgets",
    "query": "--query",
    "positions": "--positions",
    "method": "--methods",
    "text_encoder": "--text-encoder",
}
"""Settings that are no options of a method, because each has a flag of its own."""


@dataclass(frozen=True)
class ChosenMethod:
    """The name of a method, and the options it is run with."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        written = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in self.options]
        return f"{self.name}:{','.join(written)}" if written else self.name

    def with_defaults(self, options: Mapping[str, Any]) -> ChosenMethod:
        """Add options on how to read the question, unless they are set or the method ignores it."""
        if not registry.uses_query(self.name):
            return self
        return ChosenMethod(self.name, tuple(sorted({**options, **dict(self.options)}.items())))

    def settings(self) -> dict[str, Any]:
        """Return what `PruneConfig` takes; settings that it does not know go to the method."""
        settings = {key: value for key, value in self.options if key in SETTINGS}
        others = {key: value for key, value in self.options if key not in SETTINGS}
        if others and self.name != registry.ANCHORPRUNE:
            settings["method_options"] = others
        else:
            settings |= others  # PruneConfig refuses these by name
        return {"method": self.name, **settings}


def parse_methods(texts: Sequence[str]) -> list[ChosenMethod]:
    """Read methods, each once; commas separate the methods of a text as well as their options."""
    named: list[tuple[str, list[str]]] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            # A part with a name before its "=" is a method; one without continues the last method.
            head, option = part, ""
            if ":" in part.partition("=")[0]:
                head, _, option = part.partition(":")
            if "=" in head:
                if number == 0:
                    raise ValueError(f"method {text!r}: an option needs a method before it")
                named[-1][1].append(head)
            elif head == "all":
                if option:
                    raise ValueError(f"method {text!r}: options belong to one method, not to all")
                named += [(name, []) for name in registry.names()]
            else:
                named.append((head, [option] if option else []))
    methods = [_method(name, options) for name, options in named]
    return [method for place, method in enumerate(methods) if method not in methods[:place]]


def _method(name: str, options: Sequence[str]) -> ChosenMethod:
    check_choice("method", name, registry.names())
    found: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if not key or not value:
            raise ValueError(f"method {name}: option {option!r} is not of the form key=value")
        if key in _FLAGS:
            raise ValueError(
                f"method {name}: {key} is no option of a method; commands that can set it have "
                f"{_FLAGS[key]}"
            )
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    method = ChosenMethod(name, tuple(sorted(found.items())))
    PruneConfig.from_dict({"budget": 1, **method.settings()})
    return method
