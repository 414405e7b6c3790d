# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles and build contexts, as far as they can be read without Docker."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Copy:
    """`COPY SOURCES TARGET`, from the build context or (`stage`) another stage."""

    sources: list[str]
    target: str
    stage: str | None


@dataclass(frozen=True)
class Dockerfile:
    """The instructions of a file in order, with the stage that each belongs to."""

    instructions: list[tuple[int, str, str]]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*(#|$)", line)]
        stage, instructions = -1, []
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            name, _, rest = line.partition(" ")
            stage += name == "FROM"
            instructions.append((stage, name, " ".join(rest.split())))
        return cls(instructions)

    def of(self, name: str, *, last_stage: bool = False) -> list[str]:
        """What follows an instruction, each time that it is given."""
        last = self.instructions[-1][0]
        return [
            rest
            for stage, given, rest in self.instructions
            if given == name and (stage == last or not last_stage)
        ]

    def words(self, name: str) -> list[str]:
        """Of an instruction of the last stage in its JSON form; empty if it is not given."""
        given = self.of(name, last_stage=True)
        return json.loads(re.sub(r"^[^[]*", "", given[-1])) if given else []

    def stages(self) -> dict[str, str]:
        """Name -> image or stage that it begins with."""
        names = (re.split(" AS ", rest) for rest in self.of("FROM"))
        return {words[-1] if words[1:] else "": words[0] for words in names}

    def copies(self) -> list[Copy]:
        copies = []
        for rest in self.of("COPY"):
            *sources, target = [word for word in rest.split() if not word.startswith("--")]
            stage = re.search(r"--from=(\S+)", rest)
            copies.append(Copy(sources, target, stage[1] if stage else None))
        return copies

    def commands(self) -> list[list[str]]:
        """Words of each command that is run while building."""
        return [shlex.split(part) for rest in self.of("RUN") for part in rest.split(" && ")]


def is_sent(path: str, patterns: list[str]) -> bool:
    """Whether a `.dockerignore` lets a file into the build context: the last match decides."""
    sent = True
    for pattern in patterns:
        expression = _expression(pattern.removeprefix("!"))
        file = PurePosixPath(path)
        if any(re.fullmatch(expression, str(part)) for part in (file, *file.parents)):
            sent = pattern.startswith("!")
    return sent


def _expression(pattern: str) -> str:
    """As Docker reads it: `*` is one name, `**/` any number of them."""
    known = {"**/": "(?:.+/)?", "*": "[^/]+"}
    return "".join(known.get(p) or re.escape(p) for p in re.split(r"(\*\*/|\*)", pattern))
