# SPDX-License-Identifier: Apache-2.0
"""Pass metrics in files from the process that counts them to the process that is scraped.

API servers and workers are separate processes, and vLLM has no message between them that a plugin
could extend. Each process writes its values to files in one directory, in the format of
prometheus_client's multiprocess mode, and the process that is scraped adds them up. With several
API servers, vLLM has such a directory itself, and its own `/metrics` reads it. With a single one it
has none; then this module makes a directory, and a collector beside vLLM's metrics reads it. The
metrics of vLLM stay as they are.
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
    """Choose the directory, in a process that is scraped, and store it on the model's config.

    It is an attribute beside the fields of the config, because a field would become a part of the
    hash by which vLLM finds compiled code.
    """
    directory = os.environ.get(_OF_VLLM) or _own_directory().name
    setattr(model_config, _ON_MODEL_CONFIG, directory)


def directory_of(model_config: Any) -> Path | None:
    """Return the directory, or None if no metrics are wanted or it is on another machine."""
    directory = getattr(model_config, _ON_MODEL_CONFIG, None)
    return Path(directory) if directory and Path(directory).is_dir() else None


@cache
def _own_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="anchorprune-metrics-")
    MultiProcessCollector(REGISTRY, path=directory.name)
    return directory


class Series:
    """The values of one metric for one set of label values, which start at 0."""

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
        if family.kind == "gauge":  # a gauge is shown only if it has a time
            self.set(0)
        else:
            for key in (self._key, *self._bucket_keys):
                self._file.add(key, 0)

    def add(self, amount: float = 1) -> None:
        """Add an amount to a counter."""
        self._file.add(self._key, amount)

    def set(self, value: float) -> None:
        """Set a gauge to a value."""
        self._file.set(self._key, value)

    def observe(self, value: float) -> None:
        """Record a value in a histogram."""
        self._file.add(self._bucket_keys[bisect_left(self._buckets, value)], 1)
        self._file.add(self._key, value)


def _sample(family: Family) -> str:
    """Return the sample that is written besides buckets; their sum is a histogram's count."""
    return f"{family.name}_sum" if family.kind == "histogram" else family.samples[0]


def _key(family: Family, sample: str, labels: dict[str, str]) -> str:
    return mmap_key(family.name, sample, [*labels], [*labels.values()], family.help)


class _File:
    """The values of one process and one kind of metric, in memory that is mapped to a file.

    They are stored nowhere else, so two engines in one process add to the same values.
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
            # If several processes set a gauge, the value with the latest time is shown.
            self._figures.write_value(key, value, time.time())


@cache
def _file(directory: Path, kind: str, process: int) -> _File:
    """Return the file of a process for one kind of metric.

    prometheus_client reads the kind from the file's name, and uses no such names itself.
    """
    mode = "gauge_mostrecent" if kind == "gauge" else kind
    return _File(directory / f"{mode}_anchorprune-{process}.db")
