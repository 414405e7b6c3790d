# SPDX-License-Identifier: Apache-2.0
"""What Prometheus would read, by name and labels."""

from __future__ import annotations

import urllib.request

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from anchorprune_vllm.metrics.families import Family

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Labels = tuple[tuple[str, str], ...]


class Scrape:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.values: dict[tuple[str, Labels], float] = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Scrape:
        return cls(generate_latest(registry).decode())

    @classmethod
    def from_server(cls, url: str) -> Scrape:
        with _NO_PROXY.open(f"{url}/metrics", timeout=60) as response:
            return cls(response.read().decode())

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    @property
    def ours(self) -> dict[tuple[str, Labels], float]:
        return {key: v for key, v in self.values.items() if key[0].startswith("vllm:anchorprune_")}

    def value(self, family: Family | str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; there must be one."""
        name = family if isinstance(family, str) else family.samples[0]
        found = [
            value
            for (sample, given), value in self.values.items()
            if sample == name and labels.items() <= dict(given).items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)
