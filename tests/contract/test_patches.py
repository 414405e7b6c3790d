# SPDX-License-Identifier: Apache-2.0
"""Each diff in `patches/` applies to the installed vLLM, and makes one run-time patch needless.

vLLM is changed in a copy, and looked at in processes of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm import vllm_patches
from anchorprune_vllm.vllm_patches.hooks import HOOKS
from tests.support.patched_vllm import PATCHES, ROOT, PatchedVllm, changed_files, git_apply

pytestmark = pytest.mark.skipif(
    "+cpu" not in version("vllm"), reason="one of the patches is for CPU builds of vLLM alone"
)

DIFFS = sorted(PATCHES.glob("*.patch"))
each_diff = pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)


def stems(diffs: list[Path]) -> str:
    return "+".join(diff.stem for diff in diffs) or "none"


@pytest.fixture(scope="session")
def vllm_with(tmp_path_factory: pytest.TempPathFactory):
    """diffs -> a vLLM with them."""

    @cache
    def make(*diffs: Path) -> PatchedVllm:
        return PatchedVllm(tmp_path_factory.mktemp("patched"), diffs)

    return make


def report(done: subprocess.CompletedProcess[str]) -> Any:
    """The line of JSON that a program in `tests.support` ends with."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tables() -> list[list[list[str]]]:
    """Rows of the tables in the README, without their heads."""
    text = (PATCHES / "README.md").read_text()
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[row.strip("|\n ").split(" | ") for row in b.splitlines()[2:]] for b in blocks]


# -- the list -------------------------------------------------------------------------------------


def test_run_time_patches_and_diffs_are_pairs() -> None:
    assert [patch.diff for patch in vllm_patches.PATCHES] == [diff.name for diff in DIFFS]


def test_the_table_has_all_pairs() -> None:
    rows = [(diff, name, until) for diff, name, *_, until in tables()[0]]
    assert rows == [
        (f"`{patch.diff}`", f"`{patch.owner.partition(':')[2]}.{patch.name}`", patch.until)
        for patch in vllm_patches.PATCHES
    ]


def test_the_table_has_all_hooks() -> None:
    """`python -m tests.support.hooks_table` writes it."""
    assert tables()[1] == [
        [f"`{hook.file}`", f"`{hook.name}`", hook.why, f"`{hook.target}`"] for hook in HOOKS
    ]


def test_hooks_that_we_lean_on_are_there(subtests: pytest.Subtests) -> None:
    for hook in HOOKS:
        with subtests.test(hook=hook.target):
            assert hook.name in (ROOT / "anchorprune_vllm" / hook.file).read_text()
            assert hook.is_there()


@each_diff
def test_a_diff_is_a_commit_without_a_person(diff: Path) -> None:
    head, _, body = diff.read_text().partition("\n---\n")
    subject, blank, *message = head.splitlines()
    assert re.fullmatch(r"Subject: \[PATCH\] (\[\w+\])+ [A-Z].{10,60}", subject)
    assert (blank, bool(message)) == ("", True)
    assert max(map(len, message)) <= 80
    assert not re.search(r"^(From|Date|Signed-off-by):|@\S+\.\w", head, re.MULTILINE)
    added = [line[1:] for line in body.splitlines() if line.startswith("+")]
    assert max(map(len, added)) <= 88  # vLLM's limit


@pytest.mark.parametrize("diffs", [DIFFS, DIFFS[::-1]], ids=["in order", "backwards"])
def test_diffs_go_together(diffs: list[Path], tmp_path: Path) -> None:
    patched = PatchedVllm(tmp_path / "all", diffs)
    for patch in vllm_patches.PATCHES:
        module, _, names = patch.added.partition(":")
        source = (patched.folder / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {names.split('.')[-1]}(" in source


# -- the changed vLLM -----------------------------------------------------------------------------


@each_diff
def test_tests_of_a_diff_pass_with_it_alone(diff: Path, vllm_with) -> None:
    patched = vllm_with(diff)
    done = run_tests(patched, [diff])
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_tests_of_the_diffs_fail_without_them(tmp_path: Path) -> None:
    unchanged = PatchedVllm(tmp_path / "unchanged", [])
    for diff in DIFFS:
        git_apply(diff, unchanged.folder, "--include=tests/*")
    done = run_tests(unchanged, DIFFS)
    failed = set(re.findall(r"^(?:FAILED|ERROR) (\S+?\.py)", done.stdout, re.MULTILINE))
    assert failed == {test for diff in DIFFS for test in files_of_tests(diff)}


def run_tests(patched: PatchedVllm, diffs: list[Path]) -> subprocess.CompletedProcess[str]:
    tests = [test for diff in diffs for test in files_of_tests(diff)]
    assert tests
    options = [
        "-q",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-c",
        "/dev/null",
        "-rfE",
    ]
    root = ["--rootdir", str(patched.folder)]
    return patched.run("-m", "pytest", *options, *root, *tests, VLLM_PLUGINS="")


def files_of_tests(diff: Path) -> list[str]:
    return [file for file in changed_files(diff) if file.startswith("tests/")]


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that cannot be pruned."""
    folder = tmp_path_factory.mktemp("opt")
    config = {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 64},
        **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("diffs", [[], *([diff] for diff in DIFFS)], ids=stems)
def test_the_plugin_replaces_only_what_vllm_does_not_offer(
    diffs: list[Path], vllm_with, other_model: Path
) -> None:
    """Flags and refusal are there, with a diff or with the run-time patch in its place."""
    patched = vllm_with(*diffs)
    seen = report(patched.run("-m", "tests.support.patch_report", str(other_model)))
    assert (seen["vllm"], seen["plugin"]) == (str(patched.folder), str(ROOT))
    assert seen["flags"] == {"anchorprune": {"budget": "16"}}
    assert "OPTForCausalLM is not a decoder that sees images" in seen["refused"]
    assert seen["not_refused"] is None
    assert seen["replaced"] == [diff.name for diff in DIFFS if diff not in diffs]


# -- engines on it --------------------------------------------------------------------------------


@pytest.mark.engine
def test_native_positions_with_all_diffs(vllm_with, demo_models) -> None:
    """The same answers from a vLLM of which nothing is replaced."""
    model = str(demo_models("qwen2.5-vl"))
    patched, replaced = (
        report(vllm_with(*diffs).run("-m", "tests.support.native_answers", model))
        for diffs in (DIFFS, [])
    )
    assert patched["replaced"] == []
    assert replaced["replaced"] == [diff.name for diff in DIFFS]
    assert patched["reads_positions"] == replaced["reads_positions"] == [True]
    assert patched["answers"] == replaced["answers"]


@pytest.mark.engine
def test_video_pruning_of_vllm_itself_on_a_cpu(vllm_with, demo_models) -> None:
    """Without the plugin: what the third diff mends is a bug of vLLM's."""
    model = str(demo_models("qwen2.5-vl"))
    program = ("-m", "tests.support.video_pruning", model)
    unpruned, pruned = report(vllm_with(DIFFS[2]).run(*program, VLLM_PLUGINS=""))
    assert pruned < unpruned
    failed = vllm_with().run(*program, VLLM_PLUGINS="")
    assert failed.returncode != 0
    assert "shape mismatch: value tensor" in failed.stderr
