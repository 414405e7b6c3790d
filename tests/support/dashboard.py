# SPDX-License-Identifier: Apache-2.0
"""The expressions of examples/grafana.json, and the metrics that they name."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.examples import EXAMPLES

_METRIC = re.compile(r"[a-z]+:[a-z0-9_]+")


def dashboard() -> dict[str, Any]:
    return json.loads((EXAMPLES / "grafana.json").read_text())


def expressions() -> list[str]:
    """Of all panels, and of the variables that are asked for."""
    board = dashboard()
    of_panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries = [variable["query"] for variable in board["templating"]["list"]]
    return [*of_panels, *(query["query"] for query in queries if isinstance(query, dict))]


def metrics_in(expression: str) -> set[str]:
    return set(_METRIC.findall(expression))
