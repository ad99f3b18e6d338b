from __future__ import annotations

import pytest

from dynaplan.models.model import HOST, Device, Learnt, ModelPolicy, ModelState, ModelStatus, SleepLevel
from dynaplan.models.rules.memory import (
    Holding,
    Need,
    free_bytes,
    has_room,
    holding,
    holding_after_drain,
    load_s,
    need,
)
from tests.unit.models.box import GIB, gpus


@pytest.mark.parametrize(
    ("claim", "measured", "estimate", "expected"),
    [(5, 4, 3, 5), (0, 4, 3, 4), (0, 0, 3, 3), (0, 0, 0, 0)],
)
def test_a_claim_comes_before_a_measurement_and_that_before_an_estimate(
    claim: int, measured: int, estimate: int, expected: int
) -> None:
    settings = ModelPolicy(claim_bytes=claim, estimate_bytes=estimate)
    assert (
        need(settings, ModelStatus("a", learnt=Learnt(memory_bytes=measured)), gpus(24)).bytes_each
        == expected
    )


def test_a_load_that_failed_for_want_of_memory_raises_the_need_above_a_claim() -> None:
    status = ModelStatus("a", learnt=Learnt(failed_memory_bytes=8 * GIB))
    assert need(ModelPolicy(claim_bytes=5 * GIB), status, gpus(24)).bytes_each == 10 * GIB


def test_a_raised_need_is_tried_on_an_empty_device_before_it_is_larger_than_all() -> None:
    settings = ModelPolicy(estimate_bytes=5 * GIB)
    assert (
        need(settings, ModelStatus("a", learnt=Learnt(failed_memory_bytes=20 * GIB)), gpus(24)).bytes_each
        == 24 * GIB
    )
    assert (
        need(settings, ModelStatus("a", learnt=Learnt(failed_memory_bytes=24 * GIB)), gpus(24)).bytes_each
        == 30 * GIB
    )


def test_a_load_time_is_measured_or_expected_or_follows_from_the_size() -> None:
    settings = ModelPolicy(estimate_bytes=13 * 10**9, estimate_load_s=40)
    assert load_s(settings, ModelStatus("a", learnt=Learnt(load_s=25))) == 25
    assert load_s(settings, ModelStatus("a")) == 40
    assert load_s(ModelPolicy(estimate_bytes=13 * 10**9), ModelStatus("a")) == 13
    assert load_s(ModelPolicy(estimate_bytes=13 * 10**9, devices=2), ModelStatus("a")) == 26
    assert load_s(ModelPolicy(), ModelStatus("a")) == 1


LEVEL_1 = SleepLevel("1", wake_s=0.5, kept_bytes=GIB, host_bytes=8 * GIB)


def held(state: ModelState, seen: dict[int, int], claim: int = 0, **changes: str) -> Holding:
    settings = ModelPolicy(claim_bytes=claim, sleep_levels=(LEVEL_1,))
    status = ModelStatus("a", state, placed_on=(0, 1), held_bytes=seen, **changes)  # type: ignore[arg-type]
    return holding(settings, status, Need("a", 8 * GIB, 2))


def test_a_loading_model_holds_what_it_will_need_or_more() -> None:
    assert held(ModelState.LOADING, {0: GIB, 1: 9 * GIB}).bytes == {0: 8 * GIB, 1: 9 * GIB}


def test_a_ready_model_holds_what_the_driver_sees_and_at_least_its_claim() -> None:
    assert held(ModelState.READY, {0: GIB, 1: 9 * GIB}).bytes == {0: GIB, 1: 9 * GIB}
    assert held(ModelState.READY, {0: GIB, 1: 9 * GIB}, claim=8 * GIB).bytes == {0: 8 * GIB, 1: 9 * GIB}
    assert held(ModelState.DRAINING, {}).bytes == {0: 8 * GIB, 1: 8 * GIB}


def test_a_sleeper_of_no_known_level_holds_all_of_it_as_it_may_be_waking() -> None:
    assert held(ModelState.ASLEEP, {}).bytes == {0: 8 * GIB, 1: 8 * GIB}


def test_a_sleeper_holds_what_the_driver_sees_or_its_level_keeps() -> None:
    kept = {0: GIB, 1: GIB, HOST: 8 * GIB}
    assert held(ModelState.ASLEEP, {}, sleep_level="1").bytes == kept
    assert held(ModelState.ASLEEP, {0: 3 * GIB}, sleep_level="1").bytes == {**kept, 0: 3 * GIB}


def test_a_drained_model_holds_nothing_or_what_its_level_keeps() -> None:
    settings, status = ModelPolicy(sleep_levels=(LEVEL_1,)), ModelStatus("a", placed_on=(0,))
    assert holding_after_drain(settings, status, "").bytes == {}
    assert holding_after_drain(settings, status, "1").bytes == {0: GIB, HOST: 8 * GIB}


def test_what_is_free_is_what_neither_models_nor_strangers_have() -> None:
    holdings = {"a": Holding({0: 8 * GIB}), "b": Holding({1: GIB})}
    assert free_bytes(gpus(24, foreign=(3,))[0], holdings) == 13 * GIB
    assert has_room(Need("c", 13 * GIB), gpus(24, foreign=(3,))[0], holdings)
    assert not has_room(Need("c", 13 * GIB + 1), gpus(24, foreign=(3,))[0], holdings)


def test_an_exclusive_model_and_another_do_not_share_a_gpu() -> None:
    shared, alone = {"a": Holding({0: GIB})}, {"a": Holding({0: GIB}, is_exclusive=True)}
    assert not has_room(Need("b", GIB, is_exclusive=True), gpus(24)[0], shared)
    assert not has_room(Need("b", GIB), gpus(24)[0], alone)
    assert has_room(Need("b", GIB, is_exclusive=True), gpus(24, 24)[1], shared)
    host = Device(HOST, 24 * GIB)
    assert has_room(Need("b", GIB, devices=0), host, {"a": Holding({HOST: GIB}, is_exclusive=True)})


def test_nothing_goes_where_it_may_not() -> None:
    assert not has_room(Need("a", GIB, allowed=frozenset({1})), gpus(24)[0], {})
    assert not has_room(Need("a", GIB), Device(0, 24 * GIB, unusable="reserved"), {})
    assert not has_room(Need("a", GIB), Device(HOST, 24 * GIB), {})
    assert not has_room(Need("a", GIB, devices=0), gpus(24)[0], {})
