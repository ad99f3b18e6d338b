"""The closed forms give the numbers of the textbooks."""

from __future__ import annotations

import math

import pytest

from dynaplan.planner.sizing.queueing.waiting import gamma_tail, normal_tail, probability_of_waiting


@pytest.mark.parametrize(
    ("servers", "load", "expected"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (10, 8.0, 0.40918), (5, 4.0, 0.55411)]
)
def test_erlangs_c(servers: int, load: float, expected: float) -> None:
    assert probability_of_waiting(servers, load) == pytest.approx(expected, abs=1e-5)


def test_without_load_nobody_waits_and_with_too_much_everybody() -> None:
    assert probability_of_waiting(3, 0.0) == 0.0
    assert probability_of_waiting(3, 3.0) == probability_of_waiting(3, 1e6) == 1.0


@pytest.mark.parametrize("value", [0.5, 1.0, 2.0, 3.0, 4.0])
def test_a_gamma_variable_of_deviation_one_is_exponential(value: float) -> None:
    assert gamma_tail(value, 1.0, 1.0) == pytest.approx(math.exp(-value), abs=0.01)


def test_what_does_not_vary_is_above_or_below() -> None:
    assert gamma_tail(1.0, 2.0, 0.0) == 1.0
    assert gamma_tail(2.0, 2.0, 0.0) == 0.0
    assert gamma_tail(1.0, 0.0, 0.0) == 0.0
    assert gamma_tail(0.0, 1.0, 1.0) == 1.0


def test_a_normal_variable() -> None:
    assert normal_tail(0.0) == 0.5
    assert normal_tail(1.6449) == pytest.approx(0.05, abs=1e-5)
