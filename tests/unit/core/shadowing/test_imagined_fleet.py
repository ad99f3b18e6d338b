"""A fleet that exists in the model only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dynaplan.core.shadowing.imagined_fleet import ImaginedFleet, fared
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Lengths, Traffic
from tests.unit.core.planning.targets import SETTINGS, model, traffic

MODEL, PROMISE = model(), SETTINGS.targets()


def late(prefill: int, decode: int, requests_per_s: float, **more: object) -> float:
    service = MODEL.service_for(Targets(prefill, decode))
    seen = replace(traffic(requests_per_s), **more)
    _, fares = fared(ImaginedFleet(Targets(prefill, decode)), seen, 10.0, service, PROMISE)
    assert fares
    return fares.late


def test_a_worker_serves_a_start_up_time_after_it_is_asked_for():
    fleet = ImaginedFleet(Targets(1, 1)).asking(Targets(2, 1), 100.0, 60.0)
    assert fleet.serving(159.0) == Targets(1, 1)
    assert fleet.serving(160.0) == Targets(2, 1)


def test_a_worker_that_is_taken_back_while_it_starts_never_serves():
    fleet = ImaginedFleet(Targets(1, 1)).asking(Targets(3, 2), 0.0, 60.0).asking(Targets(2, 2), 10.0, 60.0)
    assert fleet.serving(10.0) == Targets(1, 1)
    assert fleet.serving(60.0) == Targets(2, 2)


def test_a_serving_worker_leaves_at_once_and_unmanaged_ones_serve_beside():
    fleet = ImaginedFleet(Targets(2, 2), alone=Targets(0, 1)).asking(Targets(1, 2), 5.0, 60.0)
    assert fleet.serving(5.0) == Targets(1, 3)
    assert fleet.managed(5.0) == Targets(1, 2)


@pytest.mark.parametrize("prefill", [1, 0], ids=["disaggregated", "aggregated"])
def test_more_workers_have_no_more_late_requests(prefill):
    rates = [late(prefill * workers, workers, 40.0) for workers in range(1, 7)]
    assert all(after <= before + 1e-9 for before, after in pairwise(rates))
    assert rates[0] > 0.5
    assert rates[-1] < 0.1


def test_a_queue_is_carried_on_until_it_is_worked_off_or_nobody_comes():
    service = MODEL.service_for(Targets(1, 1))
    fleet = ImaginedFleet(Targets(1, 1))
    after, first = fared(fleet, traffic(60.0), 10.0, service, PROMISE)
    assert after.prompts > 0
    _, second = fared(after, traffic(1.0), 20.0, service, PROMISE)
    _, rested = fared(fleet, traffic(1.0), 20.0, service, PROMISE)
    assert first
    assert second
    assert rested
    assert second.late > rested.late
    assert second.ttft_ms > rested.ttft_ms
    empty, nothing = fared(after, Traffic(10.0, requests=0.0), 20.0, service, PROMISE)
    assert (empty.prompts, empty.answers.total, nothing) == (0, 0, None)


def test_what_is_not_known_leaves_the_queues_as_they_are():
    fleet = ImaginedFleet(Targets(1, 1), prompts=7.0)
    service = MODEL.service_for(Targets(1, 1))
    assert fared(fleet, traffic(None), 10.0, service, PROMISE) == (fleet, None)


def test_a_burst_within_an_interval_is_seen_by_the_pulls():
    even = late(1, 2, 10.0, arrivals=(10.0,) * 10)
    bunched = late(1, 2, 10.0, arrivals=(0.0,) * 8 + (0.0, 100.0))
    assert bunched > even + 0.3


@pytest.mark.parametrize(("prefill", "decode"), [(1, 0), (0, 0)])
def test_without_a_worker_of_a_role_every_request_is_late(prefill, decode):
    service = MODEL.service_for(Targets(prefill, 1))
    _, fares = fared(ImaginedFleet(Targets(prefill, decode)), traffic(5.0), 10.0, service, PROMISE)
    assert fares
    assert fares.late == 1


def test_a_prompt_that_fits_no_worker_has_the_time_of_a_full_one():
    seen = replace(traffic(5.0), isl=Lengths.fixed(900_000.0))
    _, fares = fared(ImaginedFleet(Targets(0, 1)), seen, 10.0, MODEL.service_for(Targets(0, 1)), PROMISE)
    assert fares
    assert fares.ttft_ms > 0
