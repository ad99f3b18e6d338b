"""Does the SLA policy hold its belief against its record? Hours in which a backtest was wrong.

Three families that no other group has, each hour drawn from a seed:

| family | the hour |
|---|---|
| answers that change | four times and half as long as the mean, in turns of minutes; start-up 120 s |
| long answers | of reasoning: 1500 to 3000 tokens, so an answer runs for minutes |
| a crowd after a worker left | a load that falls by two thirds, and crowds from then on |

``python -m tests.bench records --repeats N``: N seeds of each, beside the best split that stands still; the
first quarter of an hour does not count. The first three seeds were looked at while the rules were written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import best_static
from dynaplan.simulation.traces.synthetic import synthetic
from tests.bench.cases import HOUR
from tests.bench.decisions import fared_row
from tests.bench.standing import fared, judged
from tests.bench.table import Row

SEEDS = (501, 502, 503, 504, 505)
DURATION_S = 3600.0
LONG, SHORT = 4.0, 0.5
"""Lengths of the answers of a turn, over the mean."""


def _changing(draws: random.Random) -> Iterator[TracedRequest]:
    rate, mean_s, osl = 4 + 3 * draws.random(), 120 + 240 * draws.random(), 120 + 60 * draws.random()
    turns, at_s = [], 0.0
    while at_s < DURATION_S:
        at_s += draws.expovariate(1 / mean_s) + 60
        turns.append(at_s)
    for each in _requests(f"poisson:rate={rate:.3g},isl=600,osl={osl:.0f},osl-cv=0.5", draws):
        turn = sum(end_s <= each.arrival_s for end_s in turns)
        factor = LONG if turn % 2 else SHORT
        yield replace(each, output_tokens=max(1, round(factor * each.output_tokens)))


def _long(draws: random.Random) -> Iterator[TracedRequest]:
    rate, osl = 1.2 + 0.8 * draws.random(), 1500 + 1500 * draws.random()
    return _requests(f"poisson:rate={rate:.3g},isl=1000,isl-cv=0.5,osl={osl:.0f},osl-cv=1", draws)


def _crowds(draws: random.Random) -> Iterator[TracedRequest]:
    high, falls_s = 4 + 3 * draws.random(), 900 + 600 * draws.random()
    for each in _requests(f"poisson:rate={high:.3g}", draws):
        if each.arrival_s < falls_s or draws.random() < 1 / 3:
            yield each


def _after_leaving(draws: random.Random) -> Iterator[TracedRequest]:
    falls_s = 2100.0
    crowds = (
        each
        for each in _requests(f"crowds:low=0.1,high={6 + 6 * draws.random():.3g},every=400,fade=60", draws)
        if each.arrival_s >= falls_s
    )
    return iter(sorted((*_crowds(draws), *crowds), key=lambda each: each.arrival_s))


def _requests(kind: str, draws: random.Random) -> Iterator[TracedRequest]:
    return synthetic(f"{kind},duration={DURATION_S:.0f}", draws.randrange(1 << 20))


SLOW_START = replace(HOUR, startup_time_s=120.0)
FAMILIES: Mapping[str, tuple[SimulateOptions, Callable[[random.Random], Iterator[TracedRequest]]]] = {
    "answers that change": (SLOW_START, _changing),
    "long answers": (HOUR, _long),
    "a crowd after a worker left": (SLOW_START, _after_leaving),
}


def hour_in(folder: Path, family: str, seed: int) -> SimulateOptions:
    """Return the options of an hour; its trace is written into the folder."""
    options, requests = FAMILIES[family]
    trace = folder / f"{family.replace(' ', '-')}-{seed}.jsonl"
    lines = [json.dumps(each.to_json()) for each in requests(random.Random(seed))]
    trace.write_text("\n".join(lines))
    return replace(options, trace=str(trace))


def rows(repeats: int) -> Iterator[Row]:
    """Yield how each hour fared, and the best split that stands still."""
    with TemporaryDirectory() as folder:
        for seed in SEEDS[:repeats]:
            for family in FAMILIES:
                hour = hour_in(Path(folder), family, seed)
                yield fared_row(f"{family} {seed}", fared(hour, "sla"))
                static = best_static(hour).best
                yield fared_row(f"{family} {seed}", judged(static.result, f"best-static:{static}"))
