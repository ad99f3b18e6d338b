"""The power of models, and the energy of their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.rules.power import WINDOW_S, ModelPower, PowerMeter, watts_by_model
from dynaplan.graph.lifecycle import Role, Worker
from tests.unit.fleet.rules.graphs import FAILED, READY

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
    assert meter.add(0.0, {"bee": 360.0}, {"bee": 0.0}) == {"bee": ModelPower(360.0)}
    # 3,600 J in 10 s are a watt-hour.
    assert meter.add(10.0, {"bee": 360.0}, {"bee": 500.0})["bee"].wh_per_1000_tokens == pytest.approx(2.0)
    assert meter.add(20.0, {"bee": 0.0}, {"bee": 750.0})["bee"].wh_per_1000_tokens == pytest.approx(2.0)
    assert meter.add(20.0 + WINDOW_S, {"bee": 0.0}, {"bee": 750.0})["bee"].wh_per_1000_tokens is None


def test_tokens_that_fell_begin_anew() -> None:
    meter = PowerMeter()
    meter.add(0.0, {"bee": 100.0}, {"bee": 500.0})
    assert meter.add(1.0, {"bee": 100.0}, {"bee": 10.0})["bee"].wh_per_1000_tokens is None
    assert meter.add(2.0, {"bee": 36.0}, {"bee": 20.0})["bee"].wh_per_1000_tokens == pytest.approx(68 / 36)
