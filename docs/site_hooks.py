# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages from outside docs/, and links that leave it.

Pages link to each other as files in the repository do, so that they can be read there too. The
site has README.md, CONTRIBUTING.md, CHANGELOG.md and patches/README.md as pages of its own. A link
to any other file of the repository becomes its name, after a check that the file exists.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = "docs"
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "patches.md": "patches/README.md",
}
"""Page of the site -> file of the repository."""

_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between files of the repository links between pages."""
    name = page.file.src_uri
    source = PAGES.get(name, f"{DOCS}/{name}")
    parts, end = [], 0
    for block in _CODE.finditer(markdown):
        parts += [_relink(markdown[end : block.start()], source), block.group()]
        end = block.end()
    return "".join([*parts, _relink(markdown[end:], source)])


def _relink(text: str, source: str) -> str:
    return _LINK.sub(lambda link: _link(source, *link.groups()), text)


def _link(source: str, mark: str, label: str, target: str) -> str:
    """Return a link of `source`, which the repository has, as the site has it."""
    if re.match(r"[a-z]+:|#", target):
        return f"{mark}[{label}]({target})"
    path, hash_, anchor = target.partition("#")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / file).exists():
        raise PluginError(f"{source} links to {target}, and there is no {file}")
    of_pages = {source: page for page, source in PAGES.items()}
    if file in of_pages:
        return f"{mark}[{label}]({of_pages[file]}{hash_}{anchor})"
    if file.startswith(f"{DOCS}/"):
        return f"{mark}[{label}]({file.removeprefix(f'{DOCS}/')}{hash_}{anchor})"
    return label if label.startswith("`") else f"{label} (`{file}`)"
