# SPDX-License-Identifier: Apache-2.0
"""README and the pages in docs/ name commands, flags, settings, errors and code that exist.

Whether their links lead anywhere is checked by `make docs`.
"""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from anchorprune_vllm.commands.main import _parser
from anchorprune_vllm.config import SETTINGS
from anchorprune_vllm.methods import registry
from anchorprune_vllm.metrics import families
from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.vllm_patches.hooks import TESTED
from tests.support.cli_args import make_arg_parser

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anchorprune_vllm"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code on a page, also those in lists."""
    pattern = rf"^( *)```{language}\n(.*?)^\1```"
    return [code for _, code in re.findall(pattern, page, re.MULTILINE | re.DOTALL)]


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


# -- commands -------------------------------------------------------------------------------------

LINES = {
    line.strip()
    for page in PAGES.values()
    for block in blocks(page, "bash")
    for line in block.replace("\\\n", " ").splitlines()
}
SERVE = re.compile(r"(?:[A-Z_]+=\S+ )*vllm serve ")


@pytest.mark.parametrize("line", sorted(line for line in LINES if line.startswith("anchorprune ")))
def test_commands_are_understood(line: str) -> None:
    assert _parser().parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("line", sorted(line for line in LINES if SERVE.match(line)))
def test_flags_of_servers_are_understood(line: str) -> None:
    words = shlex.split(SERVE.sub("", line), comments=True)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert "anchorprune" in args.hf_overrides


def test_the_pod_is_served_with_a_budget() -> None:
    (pod,) = (b for b in blocks(PAGES["deployment.md"], "yaml") if "kind: Deployment" in b)
    (container,) = yaml.safe_load(pod)["spec"]["template"]["spec"]["containers"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(container["args"])
    assert args.hf_overrides == {"anchorprune": {"budget": "64"}}


# -- configuration --------------------------------------------------------------------------------


def test_tables_of_settings_and_methods_are_complete() -> None:
    tables = PAGES["configuration.md"] + PAGES["methods.md"]
    rows = re.findall(r"^\| (`[^|]+`) \|", tables, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    by_flag = {"budget", "video_budget", "method", "query", "text_encoder"}
    settings = set(SETTINGS) - by_flag
    assert {*settings, *registry.names()} - told == set()
    assert {f"--anchorprune-{name.replace('_', '-')}" for name in by_flag} <= {
        name.split()[0] for name in told
    }


def test_the_readme_says_which_versions_were_tested() -> None:
    assert f"with vLLM {' and '.join(TESTED)}" in README


# -- metrics --------------------------------------------------------------------------------------

OURS = [each for each in vars(families).values() if isinstance(each, families.Family)]
METRIC = re.compile(r"vllm:anchorprune_\w+")


def test_every_metric_is_in_the_table_with_its_labels() -> None:
    table = section(PAGES["deployment.md"], "Metrics")
    rows = re.findall(r"^\| (`.+?`)(?: \(histogram\))? \| ([\w, ]+) \|", table, re.MULTILINE)
    told = {
        name: tuple(labels.split(", ")) for names, labels in rows for name in METRIC.findall(names)
    }
    assert told == {
        each.name if each.kind == "histogram" else each.samples[0]: each.labels for each in OURS
    }


def test_alerts_ask_for_metrics_that_exist() -> None:
    (rules,) = (b for b in blocks(PAGES["deployment.md"], "yaml") if "groups:" in b)
    (group,) = yaml.safe_load(rules)["groups"]
    asked = {name for rule in group["rules"] for name in METRIC.findall(rule["expr"])}
    assert asked
    assert asked <= {sample for each in OURS for sample in each.samples}


# -- errors ---------------------------------------------------------------------------------------

TROUBLES = re.findall(r"^\| `([^`]+)` \|", PAGES["troubleshooting.md"], re.MULTILINE)
OF_VLLM = {
    "unrecognized arguments: --anchorprune-budget",
    "Per-request mm_processor_kwargs are disabled by default",
}


@pytest.mark.parametrize("text", sorted({*TROUBLES} - OF_VLLM))
def test_error_texts_are_those_of_the_package(text: str) -> None:
    # Strings go on in the next line, and what was given differs from case to case: it is quoted,
    # or in parentheses.
    joined = re.sub(r'"\s+f?"', "", sources())
    for part in re.split(r"'[^']*'(?: \([^)]*\))?|…", text):
        assert part.strip() in joined


@cache
def sources() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))


# -- design ---------------------------------------------------------------------------------------

HOPS = re.findall(
    r"^\| \d+ \| [\w ]+ \| `([^`]+)` \| (?:`([^`]+)`)? *\|", PAGES["design.md"], re.MULTILINE
)


@pytest.mark.parametrize(("place", "name"), HOPS)
def test_each_hop_of_a_request_is_there(place: str, name: str) -> None:
    path = PACKAGE / place
    files = path.rglob("*.py") if place.endswith("/") else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert text
    for part in filter(None, name.split(".")):
        assert re.search(rf"\b(def|class) {part}\b", text)


def test_the_walk_has_all_hops() -> None:
    walk = section(PAGES["design.md"], "The way of one request")
    assert len(HOPS) == walk.count("\n|") - 2


# -- a model of one's own -------------------------------------------------------------------------

OWN_MODEL = PAGES["your-own-model.md"]


def test_the_family_in_the_docs_is_the_one_that_tests_install() -> None:
    package = ROOT / "tests/support/family_package"
    (code,) = blocks(OWN_MODEL, "python")
    assert (package / "tiled_vision.py").read_text(encoding="utf-8").endswith(f'"""\n\n{code}')
    (project,) = blocks(OWN_MODEL, "toml")
    points = configparser.ConfigParser()
    points.optionxform = str
    points.read(package / "tiled_vision-1.0.dist-info" / "entry_points.txt")
    written = tomllib.loads(project)["project"]["entry-points"]
    assert written == {name: dict(points[name]) for name in points.sections()}


def test_the_docs_have_every_hook_of_a_family() -> None:
    hooks = [name for name, value in vars(Family).items() if not name.startswith("_")]
    table = section(OWN_MODEL, "The hooks")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == hooks
