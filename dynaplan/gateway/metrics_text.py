"""Prometheus' text format, and the files in which several processes keep their metrics, both read quickly.

A Planner reads ``/metrics`` once a second, and making the text blocks the event loop: no token passes.
``prometheus_client`` checks and escapes every name and label of every sample each time, and reads the keys of
every file anew; here both is remembered. The form of its files is its own (``mmap_dict``): how many bytes are
used, and for each value the length of its key, the key, padded, the value and a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import unpack_from

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CACHE_SIZE = 65536
"""Samples, of all models and frontends, whose names and labels are remembered as text."""


def exposition_text(metrics: Iterable[Metric]) -> bytes:
    """Return the text of counters, gauges and histograms, as ``prometheus_client`` makes it."""
    lines = []
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {about}\n# TYPE {name} {metric.type}\n")
        for sample in metric.samples:
            prefix = _series_prefix(sample.name, tuple(sample.labels.items()))
            lines.append(f"{prefix} {floatToGoString(sample.value)}\n")  # type: ignore[no-untyped-call]
    return "".join(lines).encode()


@lru_cache(maxsize=CACHE_SIZE)
def _series_prefix(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    escaped = (
        (label, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for label, value in sorted(labels)
    )
    inner = ",".join(f'{label}="{value}"' for label, value in escaped)
    return f"{name}{{{inner}}}" if inner else name


@dataclass(frozen=True, eq=False)
class _Key:
    """A value's place in the text. ``bound`` is the label ``le`` of a bucket, empty for others."""

    metric: str
    sample: str
    labels: tuple[tuple[str, str], ...]
    bound: str


@lru_cache(maxsize=CACHE_SIZE)
def _key_in(text: bytes) -> _Key:
    metric, sample, labels, _ = json.loads(text)
    bound = labels.pop("le", "")
    return _Key(metric, sample, tuple(labels.items()), bound)


class SharedFiles(Collector):
    """The sums over the files of a directory; ``help_texts`` are those, by the metric's name."""

    def __init__(self, directory: Path, help_texts: Mapping[str, str]) -> None:
        self.directory = directory
        self._help_texts = help_texts
        self._layouts: dict[str, tuple[int, list[tuple[_Key, int]]]] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: sums, of gauges of the mode ``livemax`` the largest value."""
        kinds: dict[str, str] = {}
        values: dict[str, dict[_Key, float]] = {}
        for path in sorted(self.directory.glob("*.db")):
            kind = path.name.partition("_")[0]
            is_maximum = path.name.startswith("gauge_livemax")
            for key, value in self._values_in(path):
                kinds.setdefault(key.metric, kind)
                of_metric = values.setdefault(key.metric, {})
                before = of_metric.get(key)
                if before is not None:
                    value = max(before, value) if is_maximum else before + value
                of_metric[key] = value
        for name, of_metric in values.items():
            metric = Metric(name, self._help_texts.get(name, ""), kinds[name])
            _add_samples(metric, of_metric)
            yield metric

    def _values_in(self, path: Path) -> Iterator[tuple[_Key, float]]:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # another frontend has removed the gauges of a dead one
            return
        if not data:  # another frontend has made the file, and not written its size yet
            return
        (used,) = unpack_from("i", data)
        known, layout = self._layouts.get(path.name, (0, []))
        if known != used:
            layout = list(_layout_of(data, used))
            self._layouts[path.name] = used, layout
        for key, at in layout:
            yield key, unpack_from("d", data, at)[0]


def _layout_of(data: bytes, used: int) -> Iterator[tuple[_Key, int]]:
    """Yield each key with the offset of its value in ``data``."""
    at = 8
    while at < used:
        (length,) = unpack_from("i", data, at)
        value_at = at + 4 + length + 8 - (length + 4) % 8
        yield _key_in(data[at + 4 : at + 4 + length]), value_at
        at = value_at + 16


def _add_samples(metric: Metric, values: Mapping[_Key, float]) -> None:
    """Add the samples; of a histogram the buckets, whose values are not cumulative yet, and the count."""
    counts: dict[tuple[tuple[str, str], ...], list[tuple[float, str, float]]] = {}
    for key, value in values.items():
        if key.bound:
            counts.setdefault(key.labels, []).append((float(key.bound), key.bound, value))
        else:
            metric.add_sample(key.sample, dict(key.labels), value)
    for labels, buckets in counts.items():
        total = 0.0
        for _, bound, count in sorted(buckets):
            total += count
            metric.add_sample(f"{metric.name}_bucket", {**dict(labels), "le": bound}, total)
        metric.add_sample(f"{metric.name}_count", dict(labels), total)
