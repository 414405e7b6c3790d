# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anchorprune_vllm.commands.checks import check_model, check_out, check_plot


def test_where_results_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path("new"), Path("new/deeper"), Path("."), tmp_path, tmp_path / "new"):
        check_out(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("file", "--out is file, and file is no directory: choose another"),
        ("file/new/deeper", r"--out is file/new/deeper, and .*/file is no directory"),
        ("dangling/new", r"--out is dangling/new, and .*/dangling is no directory"),
        # Whoever may do all has write permission there too, and cannot make a file.
        ("/proc/new", "--out is /proc/new, and /proc cannot be written: choose another"),
    ],
)
def test_where_they_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("nowhere")
    with pytest.raises(ValueError, match=words):
        check_out(Path(out))


def test_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    check_model("owner/name")
    for wrong in ("name", "./name", "a/b/c", "~/name", str(tmp_path / "none")):
        with pytest.raises(ValueError, match=f"there is no text encoder directory '{wrong}'; the"):
            check_model(wrong, "text encoder")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is no model: there is no config\.json in it"):
        check_model(str(tmp_path))


def test_matplotlib_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install '.\[eval\]'"):
        check_plot()
