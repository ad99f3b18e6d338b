"""The load of the last hours, as frontends have kept it: samples for the charts.

Frontends end their steps when they like (``gateway/load_history.py``); so each step is spread evenly over the
time that it lasted, and what several frontends counted at one time is added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from dynaplan.cli.status_poller import summarize_load
from dynaplan.planner.metrics.exposition import ITL, REQUESTS, TTFT, Key
from dynaplan.webui.charts import DeploymentSample, ModelRates

SAMPLE_S = 10.0
"""The length of a sample in seconds."""


def samples_of_histories(histories: Iterable[Mapping[str, Any]], now_s: float) -> list[DeploymentSample]:
    """Return a sample of each ``SAMPLE_S`` seconds in which a frontend ran; ``now_s`` is since the epoch.

    What cannot be read is left out.
    """
    bins: defaultdict[int, Counter[Key]] = defaultdict(Counter)
    tokens: Counter[int] = Counter()
    of_models: defaultdict[int, dict[str, ModelRates]] = defaultdict(dict)
    for history in histories:
        try:
            for step in history["steps"]:
                counts = dict(_counts(step, history["bounds_s"]))
                for place, part in _spread(now_s - step["ended_ago_s"], step["lasted_s"]):
                    tokens[place] += part * step["tokens"]
                    bins[place].update({key: part * count for key, count in counts.items()})
                    for model, (requests, sent) in step.get("by_model", {}).items():
                        so_far = of_models[place].get(model, ModelRates())
                        more = ModelRates(part * requests / SAMPLE_S, part * sent / SAMPLE_S)
                        of_models[place][model] = so_far.plus(more)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return [
        replace(_sample(place, counts, tokens[place]), by_model=of_models[place])
        for place, counts in sorted(bins.items())
    ]


def _spread(ended_s: float, lasted_s: float) -> Iterator[tuple[int, float]]:
    """Yield the number of each sample that a step of the history overlaps, and its fraction in that."""
    began_s = ended_s - lasted_s
    for place in range(int(began_s // SAMPLE_S), int(ended_s // SAMPLE_S) + 1):
        within_s = min(ended_s, (place + 1) * SAMPLE_S) - max(began_s, place * SAMPLE_S)
        if within_s > 0:
            yield place, within_s / lasted_s


def _counts(step: Mapping[str, Any], bounds_s: Mapping[str, Sequence[float]]) -> Iterator[tuple[Key, float]]:
    """Yield the counts of a step as Prometheus has them: buckets are cumulative."""
    yield (REQUESTS, ""), float(step["requests"])
    for key, name in (("ttft", TTFT), ("itl", ITL)):
        bounds = [*map(str, bounds_s[key]), "inf"]
        observed = step[key]["buckets"]
        cumulative = list(accumulate(float(observed.get(str(index), 0.0)) for index in range(len(bounds))))
        yield from (((f"{name}_bucket", le), count) for le, count in zip(bounds, cumulative, strict=True))
        yield (f"{name}_count", ""), cumulative[-1]
        yield (f"{name}_sum", ""), float(step[key]["sum_s"])


def _sample(place: int, counts: Mapping[Key, float], tokens: float) -> DeploymentSample:
    load = summarize_load(counts, SAMPLE_S)
    return DeploymentSample(
        (place + 1) * SAMPLE_S,
        SAMPLE_S,
        requests_per_s=load.requests_per_s,
        tokens_per_s=tokens / SAMPLE_S,
        ttft_ms=load.ttft_mean_ms,
        ttft_high_ms=load.ttft_percentile_ms,
        itl_ms=load.itl_mean_ms,
        itl_high_ms=load.itl_percentile_ms,
    )
