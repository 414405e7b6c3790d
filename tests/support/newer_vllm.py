# SPDX-License-Identifier: Apache-2.0
"""Answers without a budget, and what is said to one: run this with a vLLM on PYTHONPATH.

Argument: a LLaVA-1.5. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.engine import answer, make_engine, request
from tests.support.pictures import QUESTIONS, picture

if __name__ == "__main__":
    model, asked = Path(sys.argv[1]), request(QUESTIONS[0], picture(1))
    with make_engine(model, None) as engine:
        report = {"answers": answer(engine, asked), "refused": None}
    try:
        with make_engine(model, 16) as engine:
            answer(engine, asked)
    except ValueError as error:
        report["refused"] = str(error)
    print(json.dumps(report))
