"""Batches of requests are no evidence that engines are slow: a request decodes beside all of its batch."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.model import AverageLoad, Corrections
from dynaplan.planner.sizing.corrections import GAIN, update_corrections
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from tests.unit.planner.sizing.engine_pools import Arrival, decode_times_ms
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import H200, kind

ENGINE = kind(H200).slowed(4.0)
SERVICE = QueueingModel(ENGINE, ENGINE, is_evenly_routed=True)
PROMISE = SlaTargets(2000.0, 80.0)
INTERVAL_S = 30
ONE_EACH = AverageLoad(prefill_workers=1, decode_workers=1)
OSL = 150


def batch(size: int, begin_s: int, slowness: float = 1.0, answered: int | None = None) -> Traffic:
    """An interval with a batch that comes within 3 s, its answers those of an engine that slow."""
    requests = [Arrival(begin_s + 3 * index / size, 1000, OSL) for index in range(size)]
    _, itls_ms = decode_times_ms(ENGINE.slowed(slowness), 1, requests, is_remote=True)
    ended = sorted(itls_ms)[: answered or size]
    arrivals = [0.0] * INTERVAL_S
    for each in requests:
        arrivals[int(each.at_s)] += 1
    return Traffic(
        float(INTERVAL_S),
        float(size),
        1000.0,
        float(OSL),
        100.0,
        sum(ended) / len(ended),
        isl=Lengths.fixed(1000.0),
        osl=Lengths((OSL - 1.0, float(OSL)), (0.0, float(answered or size), 0.0), float(OSL)),
        arrivals=tuple(arrivals),
    )


def aimed_at(traffic: Traffic) -> float:
    """The decode factor that many such intervals would come to."""
    after, _ = update_corrections(SERVICE, Corrections(), traffic, ONE_EACH, PROMISE)
    return after.decode ** (1 / GAIN)


@pytest.mark.parametrize("begin_s", [0, 7, 13, 20, 26])
@pytest.mark.parametrize("size", [25, 60, 120, 200])
def test_engines_as_their_profile_are_not_taken_for_slow_ones_wherever_a_batch_comes(
    size: int, begin_s: int
) -> None:
    assert aimed_at(batch(size, begin_s)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("answered", [5, 30, 100])
def test_nor_while_only_the_first_of_a_batch_are_answered(answered: int) -> None:
    """The first ones have decoded beside all that came, of which the interval's answers say nothing."""
    assert aimed_at(batch(200, 15, answered=answered)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("size", [25, 60])
def test_engines_that_are_slow_are_found_in_a_batch_too(size: int) -> None:
    assert 1.3 < aimed_at(batch(size, 10, slowness=1.6)) < 1.7
