"""Prompts that wait say how fast prefill is: by what came to the queue, and what is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.model import AverageLoad, Corrections
from dynaplan.planner.sizing.corrections import BACKLOG_GAIN, update_corrections
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from tests.unit.planner.sizing.engine_pools import Arrival, Shape, arrivals, prefill_ends_s
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import H200, kind

ENGINE = kind(H200).slowed(4.0)
SERVICE = QueueingModel(ENGINE, ENGINE)
PROMISE = SlaTargets(2000.0, 80.0)
WORKERS = 2
CAPACITY_PER_S = 17.0
"""Requests/s that two workers as their profile compute, about."""
BEGIN_S, END_S = 30, 60
"""The interval that is looked at."""


def observed(requests: Sequence[Arrival], slowness: float) -> tuple[Traffic, AverageLoad]:
    """The interval of these requests on engines that slow, with a metric pull each second."""
    ends_s = prefill_ends_s(ENGINE.slowed(slowness), WORKERS, requests)
    pulls = range(BEGIN_S + 1, END_S + 1)
    depths = [
        float(sum(each.at_s <= pull < end_s for each, end_s in zip(requests, ends_s, strict=True)))
        for pull in pulls
    ]
    came = [each for each in requests if BEGIN_S < each.at_s <= END_S]
    computed = [
        (each, end_s) for each, end_s in zip(requests, ends_s, strict=True) if BEGIN_S < end_s <= END_S
    ]
    traffic = Traffic(
        float(END_S - BEGIN_S),
        float(len(came)),
        fmean(each.isl for each, _ in computed),
        fmean(each.osl for each, _ in computed),
        fmean(1000 * (end_s - each.at_s) for each, end_s in computed),
        isl=Lengths.of([each.isl for each, _ in computed]),
        osl=Lengths.of([each.osl for each, _ in computed]),
        arrivals=tuple(float(sum(pull - 1 < each.at_s <= pull for each in came)) for pull in pulls),
    )
    return traffic, AverageLoad(
        pulls=len(depths),
        prefill_queue=fmean(depths),
        prefill_queue_first=depths[0],
        prefill_queue_last=depths[-1],
        prefill_workers=WORKERS,
        decode_workers=1,
    )


def aimed_at(traffic: Traffic, load: AverageLoad) -> float:
    """The prefill factor that many such intervals would come to."""
    after, _ = update_corrections(SERVICE, Corrections(), traffic, load, PROMISE)
    return float(after.prefill ** (1 / BACKLOG_GAIN))


def overload(seed: int, slowness: float = 1.0) -> list[Arrival]:
    """More than engines that slow compute."""
    rate = 1.3 * CAPACITY_PER_S / slowness
    return arrivals(Shape(), rate, round(rate * END_S), seed)


def burst(seed: int) -> list[Arrival]:
    """Many prompts around the interval's beginning, with few before and after."""
    before = arrivals(Shape(), 2.0, 2 * BEGIN_S, seed)
    together = arrivals(Shape(), 30.0, 200, seed + 1)
    after = arrivals(Shape(), 2.0, 50, seed + 2)
    return sorted(
        [
            *(each for each in before if each.at_s < BEGIN_S),
            *(each._replace(at_s=each.at_s + BEGIN_S - 4) for each in together),
            *(each._replace(at_s=each.at_s + BEGIN_S + 4) for each in after),
        ]
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("slowness", [0.7, 1.0, 1.43, 2.0])
def test_a_queue_that_grows_all_the_time_tells_how_fast_prompts_are_computed(
    slowness: float, seed: int
) -> None:
    traffic, load = observed(overload(seed, slowness), slowness)
    assert aimed_at(traffic, load) == pytest.approx(slowness, rel=0.1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("slowness", [0.7, 1.0, 1.43])
def test_a_queue_that_is_worked_off_tells_it_too(slowness: float, seed: int) -> None:
    traffic, load = observed(burst(seed), slowness)
    assert load.prefill_queue_last is not None
    assert load.prefill_queue_last < 8
    assert aimed_at(traffic, load) == pytest.approx(slowness, rel=0.12)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("part", [0.7, 0.85, 0.95])
def test_engines_as_their_profile_are_not_taken_for_slow_ones_where_prompts_wait_by_chance(
    part: float, seed: int
) -> None:
    rate = part * CAPACITY_PER_S
    traffic, load = observed(arrivals(Shape(), rate, round(rate * END_S), seed), 1.0)
    assert aimed_at(traffic, load) == pytest.approx(1.0, abs=0.15)


def test_an_interval_whose_queue_is_not_known_pull_by_pull_corrects_nothing_while_ttfts_miss() -> None:
    traffic, load = observed(overload(1), 2.0)
    assert (traffic.ttft_ms or 0) > PROMISE.ttft_ms
    for unknown in (
        replace(load, prefill_queue=None, prefill_queue_first=None),
        replace(load, pulls=load.pulls + 1),
    ):
        assert aimed_at(traffic, unknown) == 1.0
    assert aimed_at(replace(traffic, arrivals=()), load) == 1.0


def test_a_ttft_over_its_target_without_a_queue_corrects_nothing() -> None:
    """Those prompts have waited elsewhere: for decode workers, or in the interval before."""
    traffic, load = observed(overload(1), 2.0)
    held = float(WORKERS * ENGINE.concurrent_prefills)
    short = replace(load, prefill_queue=held / 2, prefill_queue_first=held, prefill_queue_last=0.0)
    assert aimed_at(traffic, short) == 1.0


@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_a_queue_that_no_engine_would_leave_corrects_nothing(mean: float) -> None:
    """Gone in no time, as after a purge; or as many as never came."""
    traffic, load = observed(overload(1), 2.0)
    first = load.prefill_queue_first
    assert first
    other = replace(load, prefill_queue=mean + first / load.pulls)
    assert aimed_at(traffic, other) == 1.0
