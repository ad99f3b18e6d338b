"""What a planner wants of the frontends' metrics: their names, a quick reader, and Traffic made of counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from dynaplan.domain.planning.traffic import Lengths, Traffic

DEFAULT_PREFIX = "dynamo_frontend"
"""What the names begin with, unless ``DYN_METRICS_PREFIX`` says otherwise."""

ISL, OSL = "input_sequence_tokens", "output_sequence_tokens"
TTFT, ITL, DURATION = "time_to_first_token_seconds", "inter_token_latency_seconds", "request_duration_seconds"
HISTOGRAMS = (ISL, OSL, TTFT, ITL, DURATION)
LENGTHS = (ISL, OSL)

STARTED = "requests_started_total"
"""Requests that were accepted."""

ENDED = "requests_total"
REFUSED_LABELS: Mapping[str, str] = {"model": "unknown", "error_type": "overload"}
"""Requests that found the waiting room full: demand too, and nowhere in ``STARTED``.

They are refused before their body is read, hence the model.
"""

REQUESTS = "requests"
"""The key of all arrivals, accepted or not."""

FEWEST_PULLS = 5
"""For a variance."""

Key = tuple[str, str]
"""The name of a sample without its prefix, and a bucket's ``le`` as it is written; else an empty text."""

Counts = dict[Key, float]
"""What was counted, over all models. Buckets are cumulative, as Prometheus has them."""


class Exposition:
    """Reads the wanted counts of one namespace from Prometheus' text format, without parsing the rest.

    Samples without a ``dynamo_namespace`` are taken: Dynamo's own frontends have no such label.
    """

    def __init__(self, prefix: str, namespace: str) -> None:
        self._prefix = f"{prefix}_".encode()
        histograms, lengths = "|".join(HISTOGRAMS), "|".join(LENGTHS)
        wanted = f"{STARTED}|{ENDED}|(?:{histograms})_(?:sum|count)|(?:{lengths})_bucket"
        pattern = rf"^{re.escape(prefix)}_({wanted})(\{{.*\}})? +(\S+)"
        self._sample = re.compile(pattern.encode(), re.MULTILINE)
        # A quote inside of a label's value is escaped, so that these cannot be found there.
        self._own = re.compile(rb'[{,]dynamo_namespace="' + re.escape(_escaped(namespace)) + b'"')

    def read(self, text: bytes) -> Counts:
        """The counts; ValueError when the text holds no metrics of a frontend."""
        if text.strip() and self._prefix not in text:
            raise ValueError(f"it has no metric whose name begins with {self._prefix.decode()}")
        counts: Counts = {}
        for name, labels, value in self._sample.findall(text):
            if b"dynamo_namespace=" in labels and not self._own.search(labels):
                continue
            key = _key(name.decode(), labels)
            number = float(value)
            if key and math.isfinite(number):
                counts[key] = counts.get(key, 0.0) + number
        return counts


_LE = re.compile(rb'[{,]le="([^"]*)"')
_REFUSED = [f'{name}="{value}"'.encode() for name, value in REFUSED_LABELS.items()]


def _key(name: str, labels: bytes) -> Key | None:
    """The key that a sample counts for; None when it counts for none."""
    if name == STARTED:
        return REQUESTS, ""
    if name == ENDED:
        return (REQUESTS, "") if all(each in labels for each in _REFUSED) else None
    if not name.endswith("_bucket"):
        return name, ""
    found = _LE.search(labels)
    return (name, found[1].decode()) if found else None


def _escaped(value: str) -> bytes:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode()


def has_restarted(before: Counts, now: Counts) -> bool:
    """Whether the process behind these counts began anew: then some of them fell.

    Sums of seconds do not tell: the order in which several processes are added up changes their last bits.
    """
    whole = ((key, value) for key, value in before.items() if not key[0].endswith("_sum"))
    return any(now.get(key, 0.0) < value - 0.5 for key, value in whole)


def increase(before: Counts, now: Counts) -> Counts:
    """What one process counted in between."""
    return {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}


def traffic_of(interval_s: float, seen: Counts, dispersion: float | None = None) -> Traffic:
    """The traffic of an interval in which so much was counted."""
    return Traffic(
        interval_s,
        requests=seen.get((REQUESTS, ""), 0.0),
        isl_tokens=_mean(seen, ISL),
        osl_tokens=_mean(seen, OSL),
        ttft_ms=_mean(seen, TTFT, 1000.0),
        itl_ms=_mean(seen, ITL, 1000.0),
        duration_ms=_mean(seen, DURATION, 1000.0),
        isl=_lengths(seen, ISL),
        osl=_lengths(seen, OSL),
        dispersion=dispersion,
    )


def _mean(seen: Counts, name: str, unit: float = 1.0) -> float | None:
    count = seen.get((f"{name}_count", ""), 0.0)
    return unit * seen.get((f"{name}_sum", ""), 0.0) / count if count > 0 else None


def _lengths(seen: Counts, name: str) -> Lengths | None:
    """The histogram; those of no token at all are with the shortest: their bucket has no length."""
    total = seen.get((f"{name}_count", ""), 0.0)
    if total <= 0:
        return None
    cumulative: dict[float, float] = {}
    for (sample, le), count in seen.items():
        if sample == f"{name}_bucket" and 0 < float(le) < math.inf:
            cumulative[float(le)] = cumulative.get(float(le), 0.0) + count
    bounds = sorted(cumulative)
    upto = [0.0, *(cumulative[bound] for bound in bounds), total]
    counts = tuple(max(0.0, more - less) for less, more in pairwise(upto))
    return Lengths(tuple(bounds), counts, _mean(seen, name))


def dispersion(arrivals: Sequence[tuple[float, float]]) -> float | None:
    """The variance over the mean of arrivals: (seconds, arrivals in them) for each pull; None for too few.

    Pearson's statistic over its degrees of freedom, which for equal times is the sample variance over the
    mean; unequal ones are each compared with what the mean rate makes of them.
    """
    windows = [each for each in arrivals if each[0] > 0]
    total = sum(count for _, count in windows)
    if len(windows) < FEWEST_PULLS or total <= 0:
        return None
    rate = total / sum(seconds for seconds, _ in windows)
    return _squares(windows, rate) / (len(windows) - 1)


def _squares(windows: Iterable[tuple[float, float]], rate: float) -> float:
    return sum((count - rate * seconds) ** 2 / (rate * seconds) for seconds, count in windows)
