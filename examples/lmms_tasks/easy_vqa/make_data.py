# SPDX-License-Identifier: Apache-2.0
"""Write easy-vqa's test split as the data of the task beside this file.

    pip install easy-vqa
    python examples/lmms_tasks/easy_vqa/make_data.py

1,000 pictures and 9,673 questions about them, in an order of its own, always the same: the first
so many (`lmms-eval --limit`) are a fair sample.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from anchorprune_vllm.commands.eval.vqa_data import easy_vqa


def write_data(out: Path) -> int:
    """Pictures and test.jsonl; returns how many questions there are."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, shown in enumerate(easy_vqa("test")):
        image = f"images/{number}.png"
        shown.load().save(out / image)
        rows += [
            {
                "image": image,
                "question": asked.text,
                "answer": asked.answers[0],
                "kind": asked.kind,
            }
            for asked in shown.questions
        ]
    random.Random(0).shuffle(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "test.jsonl").write_text(lines, encoding="utf-8")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    out = Path(__file__).resolve().parent / "data"
    print(f"{write_data(out)} questions in {out}")


if __name__ == "__main__":
    main()
