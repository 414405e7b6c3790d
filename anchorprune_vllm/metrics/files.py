# SPDX-License-Identifier: Apache-2.0
"""The way of a figure from the process that knows it to the one that is scraped: a file.

API servers and workers are processes of their own, and vLLM has no message between them that a
plugin may add to. Each writes its figures to files in one directory, in the form of
prometheus_client's multiprocess mode, and whoever is scraped adds them up. With several API servers
vLLM has such a directory itself, and its own `/metrics` reads it. With one it has none: then the
directory is ours, and a collector beside vLLM's metrics reads it. vLLM's own stay as they are.
"""

from __future__ import annotations

import os
import tempfile
import time
from bisect import bisect_left
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from anchorprune_vllm.metrics.families import Family

_OF_VLLM = "PROMETHEUS_MULTIPROC_DIR"
_ON_MODEL_CONFIG = "anchorprune_metrics"


def share_directory(model_config: Any) -> None:
    """Choose the directory, in a process that is scraped; it travels with the model's config.

    On the config it is an attribute beside vLLM's fields: a field would be a part of the hashes
    that compiled code is found by.
    """
    directory = os.environ.get(_OF_VLLM) or _own_directory().name
    setattr(model_config, _ON_MODEL_CONFIG, directory)


def directory_of(model_config: Any) -> Path | None:
    """None: no metrics are wanted, or they are another machine's, from where none come here."""
    directory = getattr(model_config, _ON_MODEL_CONFIG, None)
    return Path(directory) if directory and Path(directory).is_dir() else None


@cache
def _own_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="anchorprune-metrics-")
    MultiProcessCollector(REGISTRY, path=directory.name)
    return directory


class Series:
    """The figures of one metric for one set of label values; they begin at 0."""

    def __init__(self, directory: Path, family: Family, *label_values: str) -> None:
        self._file = _file(directory, family.kind, os.getpid())
        labels = dict(zip(family.labels, label_values, strict=True))
        self._key = _key(family, _sample(family), labels)
        self._buckets = family.buckets
        self._bucket_keys = [
            _key(family, f"{family.name}_bucket", {**labels, "le": floatToGoString(limit)})
            for limit in (*family.buckets, float("inf"))
            if family.kind == "histogram"
        ]
        if family.kind == "gauge":  # shown only with a time
            self.set(0)
        else:
            for key in (self._key, *self._bucket_keys):
                self._file.add(key, 0)

    def add(self, amount: float = 1) -> None:
        """To a counter."""
        self._file.add(self._key, amount)

    def set(self, value: float) -> None:
        """A gauge."""
        self._file.set(self._key, value)

    def observe(self, value: float) -> None:
        """In a histogram."""
        self._file.add(self._bucket_keys[bisect_left(self._buckets, value)], 1)
        self._file.add(self._key, value)


def _sample(family: Family) -> str:
    """Which sample is written, besides buckets: a histogram's count is what they add up to."""
    return f"{family.name}_sum" if family.kind == "histogram" else family.samples[0]


def _key(family: Family, sample: str, labels: dict[str, str]) -> str:
    return mmap_key(family.name, sample, [*labels], [*labels.values()], family.help)


class _File:
    """One process's figures of one kind: doubles by key, in memory that others see as a file.

    Figures are kept there alone, so that two engines in one process add to the same one.
    """

    def __init__(self, path: Path) -> None:
        self._figures = MmapedDict(str(path))
        self._lock = Lock()

    def add(self, key: str, amount: float) -> None:
        with self._lock:
            value, _ = self._figures.read_value(key)
            self._figures.write_value(key, value + amount, 0.0)

    def set(self, key: str, value: float) -> None:
        with self._lock:
            # Of several processes' gauges, the one with the latest time is shown.
            self._figures.write_value(key, value, time.time())


@cache
def _file(directory: Path, kind: str, process: int) -> _File:
    """A name that prometheus_client itself does not use, and that it reads the kind from."""
    mode = "gauge_mostrecent" if kind == "gauge" else kind
    return _File(directory / f"{mode}_anchorprune-{process}.db")
