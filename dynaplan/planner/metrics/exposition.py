"""The frontends' metrics as a planner needs them: names, a quick reader, and Traffic made of the counts.

A source may have any part of a histogram. Sum and count give the exact mean; buckets give the spread. Without
buckets, or with buckets that are too coarse for the mean, all requests are taken to be as long as the mean.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.forecasting.arrivals import MIN_PULLS

DEFAULT_PREFIX = "dynamo_frontend"
"""The first part of every metric's name, unless ``DYN_METRICS_PREFIX`` names another."""

ISL, OSL = "input_sequence_tokens", "output_sequence_tokens"
"""The histograms of the lengths of prompts and answers, in tokens."""

TTFT, ITL, DURATION = "time_to_first_token_seconds", "inter_token_latency_seconds", "request_duration_seconds"
"""The histograms of times: to the first token, between tokens, of a whole request."""

CACHED = "cached_tokens"
"""The histogram of the tokens of prompts that came out of a KV cache, of answers that state it."""

HISTOGRAMS = (ISL, OSL, TTFT, ITL, DURATION, CACHED)
"""The histograms whose sums and counts are read."""

LENGTHS = (ISL, OSL)
"""The histograms whose buckets are read too."""

STARTED = "requests_started_total"
"""The counter of accepted requests."""

ENDED = "requests_total"
"""The counter of ended and of refused requests, distinguished by labels."""

OVER_TTFT, OVER_ITL = "requests_over_ttft_total", "requests_over_itl_total"
"""The counters of requests that missed a promised time; only our frontends have them."""

TARGET_MS = "target_ms"
"""The label of the promised time of those, in ms."""

REFUSED_LABELS: Mapping[str, str] = {"model": "unknown", "error_type": "overload"}
"""The labels of requests that found the waiting room full: demand too, and not counted in ``STARTED``.

They are refused before their body is read, hence the unknown model: they count for every model.
"""

REQUESTS = "requests"
"""The key of all arrivals, accepted or not."""

Key = tuple[str, str]
"""The name of a sample without its prefix, and a bucket's ``le``, or ``target_ms``, as it is written; else an
empty text."""

Counts = dict[Key, float]
"""Counts by key, added up over all models. Buckets are cumulative, as in Prometheus."""


def metrics_prefix() -> str:
    """Return the first part of the names of the frontends' metrics."""
    return os.environ.get("DYN_METRICS_PREFIX") or DEFAULT_PREFIX


class Exposition:
    """Reads the wanted counts of one namespace from Prometheus' text format, without parsing the rest.

    With a ``model`` only its samples are read, whatever the case of its name: some frontends write it in
    lower case. Samples without the label ``dynamo_namespace`` or ``model`` are taken: Dynamo's own frontends
    have no namespace. ``buckets`` are the histograms whose buckets are read. Where the model
    ``is_one_of_several`` others may be served alone, and requests whose model is not known are nobody's.
    """

    def __init__(
        self,
        prefix: str,
        namespace: str,
        model: str = "",
        *,
        buckets: Sequence[str] = LENGTHS,
        is_one_of_several: bool = False,
    ) -> None:
        self._prefix = f"{prefix}_".encode()
        histograms, lengths = "|".join(HISTOGRAMS), "|".join(buckets)
        wanted = (
            f"{STARTED}|{ENDED}|{OVER_TTFT}|{OVER_ITL}|(?:{histograms})_(?:sum|count)|(?:{lengths})_bucket"
        )
        pattern = rf"^{re.escape(prefix)}_({wanted})(\{{.*\}})? +(\S+)"
        self._sample = re.compile(pattern.encode(), re.MULTILINE)
        # A quote inside of a label's value is escaped, so that these cannot be found there.
        self._own = re.compile(rb'[{,]dynamo_namespace="' + re.escape(_escaped(namespace)) + b'"')
        self._model = re.compile(rb'[{,]model="' + re.escape(_escaped(model)) + b'"', re.IGNORECASE)
        self._has_model = bool(model)
        self.served = ServedNames(model)
        self.served.is_served = is_one_of_several
        self._takes_refused = not is_one_of_several

    def read(self, text: bytes) -> Counts:
        """The counts; ValueError when the text holds no metrics of a frontend."""
        if text.strip() and self._prefix not in text:
            raise ValueError(f"it has no metric whose name begins with {self._prefix.decode()}")
        counts: Counts = {}
        for name, labels, value in self._sample.findall(text):
            if not self._is_own(labels):
                continue
            key = _key(name.decode(), labels)
            number = float(value)
            if key and math.isfinite(number):
                counts[key] = counts.get(key, 0.0) + number
        return counts

    def read_by_model(self, text: bytes) -> dict[str, Counts]:
        """Return the counts of each model that has any, by its name; under "" those without a model."""
        found: dict[str, Counts] = {}
        for name, labels, value in self._sample.findall(text):
            key, number = _key(name.decode(), labels), float(value)
            if not key or not math.isfinite(number) or not self._is_own(labels):
                continue
            model = _MODEL.search(labels)
            counts = found.setdefault(_unescaped(model[1]) if model else "", {})
            counts[key] = counts.get(key, 0.0) + number
        return found

    def _is_own(self, labels: bytes) -> bool:
        if b"dynamo_namespace=" in labels and not self._own.search(labels):
            return False
        if not self._has_model or b"model=" not in labels:
            return True
        if self._model.search(labels):
            self.served.is_served = True
            return True
        if self._takes_refused and _is_refused(labels):
            return True
        if not self.served.is_enough and (other := _MODEL.search(labels)):
            self.served.note(other[1].decode(errors="replace"))
        return False


class ServedNames:
    """The models that frontends have counted requests for, beside the ``served-model-name`` of a planner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._others: set[str] = set()
        self.is_served = False

    @property
    def is_enough(self) -> bool:
        """True when no further model need be noted: the own one is served, or enough others are."""
        return self.is_served or len(self._others) >= MAX_NAMED_MODELS

    def note(self, model: str) -> None:
        """Note a model that requests were counted for, whatever the case of its name."""
        if model.lower() == self._name.lower():
            self.is_served = True
        elif not self.is_enough and model != REFUSED_LABELS["model"]:
            self._others.add(model)

    @property
    def unserved(self) -> str:
        """Say that requests were counted for other models, and none ever for this one; "" if not so."""
        if self.is_served or not self._others:
            return ""
        others = ", ".join(map(repr, sorted(self._others)))
        return f"served-model-name is {self._name!r}, and the frontends have served {others} only"


MAX_NAMED_MODELS = 5
"""Other models that are named."""

_MODEL = re.compile(rb'[{,]model="((?:[^"\\]|\\.)*)"')
_LE = re.compile(rb'[{,](?:le|target_ms)="([^"]*)"')
_REFUSED = [f'{name}="{value}"'.encode() for name, value in REFUSED_LABELS.items()]


def _key(name: str, labels: bytes) -> Key | None:
    """Return the key to which a sample's value is added; None for a sample that is not used."""
    if name == STARTED:
        return REQUESTS, ""
    if name == ENDED:
        return (REQUESTS, "") if _is_refused(labels) else None
    if not name.endswith("_bucket") and name not in (OVER_TTFT, OVER_ITL):
        return name, ""
    found = _LE.search(labels)
    return (name, found[1].decode()) if found and is_bucket_bound(found[1]) else None


def is_bucket_bound(le: str | bytes) -> bool:
    """Tell whether this is the upper bound of a bucket: a number, or infinity."""
    try:
        return not math.isnan(float(le))
    except ValueError:
        return False


def _is_refused(labels: bytes) -> bool:
    return all(label in labels for label in _REFUSED)


def _escaped(value: str) -> bytes:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode()


def _unescaped(label: bytes) -> str:
    """Return the value of a label as it was before ``_escaped``."""
    text = label.decode(errors="replace")
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def has_restarted(before: Counts, now: Counts) -> bool:
    """Tell whether the process behind these counts was restarted: then some of them fell.

    Sums of seconds are not compared: the order in which several processes are added up changes their last
    bits.
    """
    whole = ((key, value) for key, value in before.items() if not key[0].endswith("_sum"))
    return any(now.get(key, 0.0) < value - 0.5 for key, value in whole)


def increase(before: Counts, now: Counts) -> Counts:
    """Subtract two counts of one process: its growth between them."""
    return {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}


def traffic_of(interval_s: float, seen: Counts, dispersion: float | None = None) -> Traffic:
    """Make Traffic of the counts of one interval; for ``dispersion`` see the function of that name."""
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
        prefix_hit_rate=_hit_rate(seen),
        over_ttft=_missed(seen, OVER_TTFT),
        over_itl=_missed(seen, OVER_ITL),
        first_tokens=seen.get((f"{TTFT}_count", "")),
    )


def _missed(seen: Counts, name: str) -> tuple[tuple[float, float], ...]:
    """Return the requests that missed each target: (target in ms, requests)."""
    return tuple((float(target_ms), count) for (sample, target_ms), count in seen.items() if sample == name)


def _hit_rate(seen: Counts) -> float | None:
    """Return the cached part of the prompts' tokens, 0 to 1; None where no answer states cached tokens.

    The means are compared, because engines may state cached tokens in a part of their answers only.
    """
    cached, tokens = _mean(seen, CACHED), _mean(seen, ISL)
    return min(1.0, cached / tokens) if cached is not None and tokens else None


def _mean(seen: Counts, name: str, unit: float = 1.0) -> float | None:
    count = seen.get((f"{name}_count", ""), 0.0)
    return unit * seen.get((f"{name}_sum", ""), 0.0) / count if count > 0 else None


def _lengths(seen: Counts, name: str) -> Lengths | None:
    """The histogram with its exact mean; None when nothing was counted.

    Requests of no token at all are counted with the shortest, since the bucket up to 0 has no width. The
    bucket above the last bound reaches to twice that bound. When the mean is still above everything that the
    buckets can hold, or there are none, all requests get the mean as their length.
    """
    mean = _mean(seen, name)
    if mean is None:
        return None
    cumulative: dict[float, float] = {}
    for (sample, le), count in seen.items():
        if sample == f"{name}_bucket" and float(le) > 0:
            cumulative[float(le)] = cumulative.get(float(le), 0.0) + count
    # Sources without buckets add to the count alone: the buckets' own total is that of the last one.
    total = cumulative.pop(math.inf, seen[f"{name}_count", ""])
    bounds = sorted(cumulative)
    upto = [0.0, *(cumulative[bound] for bound in bounds), total]
    counts = tuple(max(0.0, more - less) for less, more in pairwise(upto))
    lengths = Lengths(tuple(bounds), counts, mean)
    return lengths if bounds and mean <= lengths.greatest_mean_tokens else Lengths.fixed(mean)


def dispersion(arrivals: Sequence[tuple[float, float]]) -> float | None:
    """The variance over the mean of arrivals; None when there were too few pulls, or no arrival.

    ``arrivals`` are, for each pull, the seconds since the one before it and the requests that arrived in
    them. The formula is Pearson's chi-squared statistic over its degrees of freedom:

        sum((n_i - r * t_i)^2 / (r * t_i)) / (pulls - 1),    r = sum(n_i) / sum(t_i)

    For equal times t_i that is the sample variance over the mean: 1 for independent clients (Poisson).
    """
    windows = [each for each in arrivals if each[0] > 0]
    total = sum(count for _, count in windows)
    if len(windows) < MIN_PULLS or total <= 0:
        return None
    rate = total / sum(seconds for seconds, _ in windows)
    return _squares(windows, rate) / (len(windows) - 1)


def _squares(windows: Iterable[tuple[float, float]], rate: float) -> float:
    return sum((count - rate * seconds) ** 2 / (rate * seconds) for seconds, count in windows)
