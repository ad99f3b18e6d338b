"""The formulas of the seeds give the original's numbers, and something sensible where it has none."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from dynaplan.adapters.engines.sim.profiles import load_profile
from dynaplan.adapters.profiles.tables import tables_of
from dynaplan.core.sizing.formula import Formula
from dynaplan.domain.planning.sizing import Corrections, Sizing, SlaTargets, WorkerLimits
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Expected, Traffic

CURRENT = Targets(2, 3)
SEEN = Traffic(180.0, 1800.0, 3000.0, 150.0, ttft_ms=120.9174, itl_ms=20.0, duration_ms=3000.0)


@cache
def formula() -> Formula:
    tables = tables_of(load_profile("h200_sxm-Llama-3.1-8B-Instruct-FP8"), "H200")
    return Formula.from_tables(tables, tables)


def sized(expected: Expected, **changes: object) -> Sizing:
    arguments: dict[str, object] = {
        "interval_s": 180.0,
        "targets": SlaTargets(500.0, 10.0),
        "corrections": Corrections(),
        "limits": WorkerLimits(max_gpus=64),
        "current": CURRENT,
        **changes,
    }
    return formula().size(expected, **arguments)  # type: ignore[arg-type]


def test_the_numbers_of_workers_are_those_of_the_seeds() -> None:
    sizing = sized(Expected(36_000, 3000, 300))
    assert sizing.targets == Targets(
        math.ceil(36_000 * 3000 / 180 / 49481.1), math.ceil(36_000 * 300 / 180 / 4555.68)
    )
    assert [step.stage for step in sizing.steps] == ["prefill", "decode", "budget"]
    assert "600000 prompt tokens/s at 49481 tokens/s" in sizing.steps[0].why


def test_a_worker_of_several_gpus_does_as_much_as_they_do_each() -> None:
    limits = WorkerLimits(max_gpus=64, prefill_gpus=4, decode_gpus=2)
    assert sized(Expected(36_000, 3000, 300), limits=limits).targets == Targets(4, 7)


def test_a_high_ttft_needs_no_more_prefill_workers_but_a_low_one_fewer() -> None:
    expected = Expected(36_000, 3000, 300)
    assert sized(expected, corrections=Corrections(prefill=5.0)).targets.prefill == 13
    assert sized(expected, corrections=Corrections(prefill=0.5)).targets.prefill == 7


def test_a_high_itl_tightens_the_target_and_none_leaves_it() -> None:
    expected = Expected(36_000, 3000, 300)
    assert sized(expected, corrections=Corrections(decode=2.0)).targets.decode > 14
    assert sized(expected, corrections=Corrections(decode=0.0)).targets.decode == 14


def test_the_corrections_are_measured_over_expected() -> None:
    after, why = formula().corrections(Corrections(), SEEN, decode_workers=3)
    assert after.prefill == pytest.approx(2.0, abs=1e-4)
    concurrency = 1800 / 3 * 3.0 / 180
    assert after.decode == pytest.approx(20.0 / formula().decode.itl_ms(concurrency, 3075))
    assert "TTFT 2, ITL" in why


@pytest.mark.parametrize(
    ("traffic", "reason"),
    [
        (replace(SEEN, requests=0.0), "there were no requests"),
        (replace(SEEN, requests=None, missing="the frontend is away"), "the frontend is away"),
        (replace(SEEN, isl_tokens=math.nan), "something was not measured"),
    ],
)
def test_an_interval_that_tells_nothing_leaves_the_corrections(traffic: Traffic, reason: str) -> None:
    before = Corrections(0.7, 1.3)
    after, why = formula().corrections(before, traffic, decode_workers=3)
    assert after == before
    assert reason in why


def test_only_what_was_measured_is_corrected() -> None:
    before = Corrections(0.7, 1.3)
    assert formula().corrections(before, replace(SEEN, ttft_ms=math.nan), 3)[0].prefill == 0.7
    assert formula().corrections(before, SEEN, decode_workers=0)[0].decode == 1.3


def test_a_profile_that_expects_nothing_corrects_nothing() -> None:
    tables = tables_of(load_profile("h200_sxm-Llama-3.1-8B-Instruct-FP8"), "H200")
    none = tuple((0.0,) * 100 for _ in range(100))
    nothing = replace(
        tables,
        prefill=replace(tables.prefill, ttft_ms=((0.0,) * 4,) * len(tables.prefill.ttft_ms)),
        decode=replace(tables.decode, itl_ms=none, tokens_per_s_per_gpu=none),
    )
    zero = Formula.from_tables(nothing, nothing)
    assert zero.corrections(Corrections(), SEEN, 3)[0] == Corrections()
    sizing = zero.size(Expected(1, 1, 1), 180.0, SlaTargets(), Corrections(), WorkerLimits(), CURRENT)
    assert sizing.targets == CURRENT
    assert "change nothing" in sizing.steps[-1].why


def test_no_traffic_is_no_demand_whatever_its_lengths() -> None:
    assert sized(Expected(0.0, math.nan, None)).targets == Targets(1, 1)


@pytest.mark.parametrize(
    "expected",
    [
        Expected(),
        Expected(10.0),
        Expected(10.0, math.nan, 5.0),
        Expected(math.nan, 5.0, 5.0),
        Expected(10, 0, 0),
    ],
)
def test_what_could_not_be_foretold_changes_nothing(expected: Expected) -> None:
    sizing = sized(expected)
    assert sizing.targets == CURRENT
    assert "no data: change nothing" in sizing.steps[0].why


def test_the_budget_is_not_exceeded_where_the_original_exceeds_it() -> None:
    """1 prefill worker of 2 GPUs and 4 decode workers of 4 on 16 GPUs: the original asks for 18."""
    limits = WorkerLimits(max_gpus=16, prefill_gpus=2, decode_gpus=4)
    sizing = sized(Expected(5_400, 3000, 2000), limits=limits)
    assert sizing.steps[-1].before == Targets(1, 4)
    assert sizing.targets == Targets(1, 3)
    assert "18 GPUs are over the budget of 16: 14 of them" in sizing.steps[-1].why
