# SPDX-License-Identifier: Apache-2.0
"""Try all tiny checkpoints: `python -m tests.sweep [NAME …]`, or `make sweep`.

One engine at a time, each in a process of its own: one that dies or hangs is a result too. What was
tried already is not tried again, so an interrupted sweep goes on. At the end the results are put
into the record in the package, and docs/models.md is written from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import transformers
import vllm

from anchorprune_vllm.commands.models.record import (
    RECORD,
    Architecture,
    Record,
    Trial,
    read_record,
    write_record,
)
from anchorprune_vllm.commands.models.registry import installed_architectures
from anchorprune_vllm.commands.results_file import write_json
from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.support.checkpoints import CHECKPOINTS
from tests.support.own_process import run_in_process
from tests.support.reference import REFERENCES
from tests.sweep.page import write_page
from tests.sweep.trial import try_checkpoint

ROOT = Path(__file__).parents[2]

_FOLDERS = "vLLM reads its weights from the folders of a diffusion pipeline alone"
_GPU = "vLLM has it for GPUs alone (its folders nvidia and amd)"
_OTHER_CONFIG = "vLLM reads the configuration of the hub's own code, which transformers has changed"
_NOT_MADE = {
    "Cosmos3EdgeForConditionalGeneration": _FOLDERS,
    "Cosmos3ForConditionalGeneration": _FOLDERS,
    "Ernie4_5_VLMoeForConditionalGeneration": f"{_OTHER_CONFIG} (im_patch_id)",
    "Gemma3nForConditionalGeneration": "its tower is one of the package timm, which vLLM does not "
    "bring",
    "Glm5NextForConditionalGeneration": _GPU,
    "LlavaNextVideoForConditionalGeneration": "it sees videos alone, and a trial begins with "
    "images",
    "MiniMaxM3SparseForConditionalGeneration": _GPU,
    "Qwen4ExpForConditionalGeneration": _GPU,
    "Step3p7ForConditionalGeneration": f"{_OTHER_CONFIG} (width)",
}
"""Architecture → why there is no tiny checkpoint of it, for those that were looked into."""


def main(argv: Sequence[str] | None = None) -> None:
    """Try what is left, and write the record."""
    args = _parser().parse_args(argv)
    results = args.directory / vllm.__version__
    results.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(args.names, 1):
        file = results / f"{name}.json"
        is_new = args.again or not file.exists()
        if is_new:
            print(f"[{number}/{len(args.names)}] {name} …", flush=True)
            write_json(file, asdict(run_trial(name, results, args.time_limit)))
        trial = _read(file)
        if is_new:
            print(f"    {trial.outcome}, {trial.level or 'no level'} {trial.why}", flush=True)
    record = make_record(_all_trials(results))
    write_record(record)
    write_page(record)
    print("Written: the record in the package, and docs/models.md")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of tiny checkpoints (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="also those that were tried already")
    parser.add_argument(
        "--time-limit", type=float, default=600, metavar="S", help="seconds of each (default: 600)"
    )
    parser.add_argument(
        "--directory", type=Path, default=ROOT / ".sweep", help="for results (default: .sweep)"
    )
    parser.set_defaults(names=[*CHECKPOINTS])
    return parser


def run_trial(name: str, results: Path, time_limit: float) -> Trial:
    """Try a checkpoint in a process of its own, and return what became of it."""
    log = results / f"{name}.log"
    work = run_in_process(_try_in_scratch, name, log=log, time_limit=time_limit)
    # Without a word, not even the checkpoint could be made.
    trial = work.told or Trial(name, name, "begun")
    if trial.outcome != "begun":
        return trial
    return replace(trial, outcome=work.ending, why=work.why)


def _try_in_scratch(name: str) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as scratch:
        yield from try_checkpoint(name, Path(scratch))


def _read(file: Path) -> Trial:
    return Trial(**json.loads(file.read_text(encoding="utf-8")))


def _all_trials(results: Path) -> list[Trial]:
    """Return the trials of all checkpoints: of this sweep, or else as recorded on this vLLM."""
    recorded = read_record() if RECORD.exists() else Record("", {}, [])
    before = recorded.trials if recorded.vllm == vllm.__version__ else []
    found = {trial.checkpoint: trial for trial in before}
    found |= {file.stem: _read(file) for file in results.glob("*.json")}
    return [found[name] for name in CHECKPOINTS if name in found]


def make_record(trials: Sequence[Trial]) -> Record:
    """Return the record of a whole sweep."""
    tried = {trial.architecture for trial in trials}
    can_be_made = {tiny.architecture for tiny in TINY_MODELS.values()}
    found = installed_architectures({})
    return Record(
        vllm=vllm.__version__,
        architectures={
            name: architecture if name in tried else _untried(name, architecture, can_be_made)
            for name, architecture in found.items()
        },
        trials=trials,
        references=sorted(REFERENCES),
    )


def _untried(name: str, found: Architecture, can_be_made: Container[str]) -> Architecture:
    """Say why there is no trial of an architecture that sees."""
    if not found.media or found.refused or found.untried:
        return found
    if name in can_be_made:
        return replace(found, untried="its tiny checkpoint was not tried yet")
    why = "no tiny checkpoint yet"
    if name in _NOT_MADE:
        why += f": {_NOT_MADE[name]}"
    elif not hasattr(transformers, name):
        why += ": transformers has no class of this name to make one with"
    return replace(found, untried=why)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` ends the trial too
    main()
