"""The power of models, and the energy of their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.rules.power import WINDOW_S, ModelPower, PowerMeter, watts_by_model
from dynaplan.graph.lifecycle import Role, Worker
from tests.unit.fleet.rules.graphs import FAILED, READY

BEE = ("frontend", "bee")
MODELS = {"ant": "ant:8b", "bee": "bee"}


def running(component: str, *gpus: int) -> Worker:
    return Worker(f"ns_{component}", component, Role.DECODE, READY, gpus=gpus, pid=7)


def test_a_model_draws_what_its_gpus_draw_and_the_workers_of_a_shared_one_have_equal_parts() -> None:
    workers = [running("ant", 0, 1), running("bee", 1), running("bee", 1), running("own", 2)]
    watts = watts_by_model({0: 500.0, 1: 300.0, 2: 90.0, 3: 70.0}, workers, MODELS)
    assert watts == {"ant:8b": pytest.approx(600.0), "bee": pytest.approx(200.0), "own": 90.0}


def test_a_worker_without_a_process_and_a_gpu_that_does_not_tell_draw_nothing() -> None:
    workers = [replace(running("ant", 0), pid=0), replace(running("bee", 0), state=FAILED), running("bee", 1)]
    assert watts_by_model({0: 500.0}, workers, MODELS) == {}


def test_the_energy_of_tokens_is_that_of_the_last_minute() -> None:
    meter = PowerMeter()
    assert meter.add(0.0, {"bee": 360.0}, {BEE: 0.0}) == {"bee": ModelPower(360.0)}
    # 3,600 J in 10 s are a watt-hour.
    assert meter.add(10.0, {"bee": 360.0}, {BEE: 500.0})["bee"].wh_per_1000_tokens == pytest.approx(2.0)
    assert meter.add(20.0, {"bee": 0.0}, {BEE: 750.0})["bee"].wh_per_1000_tokens == pytest.approx(2.0)
    assert meter.add(20.0 + WINDOW_S, {"bee": 0.0}, {BEE: 750.0})["bee"].wh_per_1000_tokens is None


def test_tokens_that_fell_begin_anew() -> None:
    meter = PowerMeter()
    meter.add(0.0, {"bee": 36.0}, {BEE: 500.0})
    assert meter.add(5.0, {"bee": 36.0}, {BEE: 10.0})["bee"].wh_per_1000_tokens is None
    assert meter.add(10.0, {"bee": 36.0}, {BEE: 20.0})["bee"].wh_per_1000_tokens == pytest.approx(10.0)


def test_a_frontend_that_misses_a_reading_brings_no_more_than_its_tokens_since() -> None:
    meter, other = PowerMeter(), ("other frontend", "bee")
    for at_s in range(0, 60, 5):
        tokens = {BEE: 1e6 + 10 * at_s, other: 1e6 + 10 * at_s}
        if at_s == 20:
            del tokens[other]
        power = meter.add(at_s, {"bee": 360.0}, tokens)["bee"]
        if at_s > 25:
            assert power.wh_per_1000_tokens == pytest.approx(5.0)


def test_the_life_of_a_frontend_that_is_new_or_was_long_gone_is_not_that_of_the_last_minute() -> None:
    meter, new = PowerMeter(), ("new frontend", "bee")
    meter.add(0.0, {"bee": 360.0}, {BEE: 0.0})
    assert meter.add(10.0, {"bee": 360.0}, {BEE: 500.0, new: 1e6})["bee"].wh_per_1000_tokens == 2.0
    for at_s in (20.0, 50.0, 80.0):
        meter.add(at_s, {"bee": 360.0}, {BEE: 500.0})
    assert meter.add(90.0, {"bee": 360.0}, {BEE: 500.0, new: 2e6})["bee"].wh_per_1000_tokens is None


def test_a_clock_that_goes_back_begins_anew() -> None:
    meter = PowerMeter()
    meter.add(10.0, {"bee": 360.0}, {BEE: 0.0})
    assert meter.add(5.0, {"bee": 360.0}, {BEE: 500.0})["bee"].wh_per_1000_tokens is None
    assert meter.add(15.0, {"bee": 360.0}, {BEE: 1000.0})["bee"].wh_per_1000_tokens == pytest.approx(2.0)
