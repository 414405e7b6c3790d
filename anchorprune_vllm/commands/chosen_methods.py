# SPDX-License-Identifier: Apache-2.0
"""Methods as the command line names them: `NAME`, or `NAME:key=value,key=value`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.checks import check_choice
from anchorprune_vllm.config import SETTINGS, PruneConfig
from anchorprune_vllm.methods import registry as known

# Not options of a method: each has a flag of its own.
_FLAGS = {
    "budget": "--budgets",
    "video_budget": "--budgets",
    "query": "--query",
    "positions": "--positions",
    "method": "--methods",
    "text_encoder": "--text-encoder",
}


@dataclass(frozen=True)
class Method:
    """A way to choose tokens, and what it is set to."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = ",".join(f"{key}={_written(value)}" for key, value in self.options)
        return f"{self.name}:{options}" if options else self.name

    def with_defaults(self, options: Mapping[str, Any]) -> Method:
        """Return the method with options on how it reads the question; its own come first.

        A method that does not look at the question stays as it is.
        """
        if not known.uses_query(self.name):
            return self
        return Method(self.name, tuple(sorted({**options, **dict(self.options)}.items())))

    def settings(self) -> dict[str, Any]:
        """As `PruneConfig` takes them: what it does not know itself, the method may."""
        settings = {key: value for key, value in self.options if key in SETTINGS}
        others = {key: value for key, value in self.options if key not in SETTINGS}
        if others and self.name != known.ANCHORPRUNE:
            settings["method_options"] = others
        else:
            settings |= others  # refused by name there
        return {"method": self.name, **settings}


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Read `NAME` and `NAME:key=value,key=value`; several in one text are parted by commas too."""
    named: list[tuple[str, list[str]]] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            # A part with a name before its "=" is a method; one without goes on with the last.
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
                named += [(name, []) for name in known.names()]
            else:
                named.append((head, [option] if option else []))
    methods = [_method(name, options) for name, options in named]
    return [method for place, method in enumerate(methods) if method not in methods[:place]]


def _method(name: str, options: Sequence[str]) -> Method:
    check_choice("method", name, known.names())
    found: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"method {name}: option {option!r} is not of the form key=value")
        if key in _FLAGS:
            raise ValueError(
                f"method {name}: {key} is no option of a method; commands that can set it have "
                f"{_FLAGS[key]}"
            )
        found[key] = _read(value)
    method = Method(name, tuple(sorted(found.items())))
    PruneConfig.from_dict({"budget": 1, **method.settings()})
    return method


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
