# SPDX-License-Identifier: Apache-2.0
"""Write the table of hooks in patches/README.md: python -m tests.support.hooks_table."""

from __future__ import annotations

import re

from anchorprune_vllm.vllm_patches.hooks import HOOKS
from tests.support.patched_vllm import PATCHES

_TABLE = re.compile(r"(^\| file \|.*\n\|[-|]+\n)(?:^\|.*\n)*", re.MULTILINE)


def main() -> None:
    page = PATCHES / "README.md"
    rows = [f"| `{h.file}` | `{h.name}` | {h.why} | `{h.target}` |\n" for h in HOOKS]
    text, count = _TABLE.subn(lambda table: table[1] + "".join(rows), page.read_text("utf-8"))
    if count != 1:
        raise ValueError(f"{page}: one table begins with '| file |', found {count}")
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
