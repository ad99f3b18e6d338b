from __future__ import annotations

import pytest

from dynaplan.models.model import HOST, Device, Learnt, ModelPolicy, ModelState, ModelStatus, SleepLevel
from dynaplan.models.rules.memory import (
    Holding,
    Need,
    free_bytes,
    gb,
    has_room,
    holding,
    holding_after_drain,
    load_s,
    need,
)
from tests.unit.models.box import GB, gpus


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
    status = ModelStatus("a", learnt=Learnt(failed_memory_bytes=8 * GB))
    assert need(ModelPolicy(claim_bytes=5 * GB), status, gpus(24)).bytes_each == 10 * GB


def test_a_raised_need_is_tried_on_an_empty_device_before_it_is_larger_than_all() -> None:
    settings = ModelPolicy(estimate_bytes=5 * GB)
    assert (
        need(settings, ModelStatus("a", learnt=Learnt(failed_memory_bytes=20 * GB)), gpus(24)).bytes_each
        == 24 * GB
    )
    assert (
        need(settings, ModelStatus("a", learnt=Learnt(failed_memory_bytes=24 * GB)), gpus(24)).bytes_each
        == 30 * GB
    )


def test_a_load_time_is_measured_or_expected_or_follows_from_the_size() -> None:
    settings = ModelPolicy(estimate_bytes=13 * GB, estimate_load_s=40)
    assert load_s(settings, ModelStatus("a", learnt=Learnt(load_s=25))) == 25
    assert load_s(settings, ModelStatus("a")) == 40
    assert load_s(ModelPolicy(estimate_bytes=13 * GB), ModelStatus("a")) == 13
    assert load_s(ModelPolicy(estimate_bytes=13 * GB, devices=2), ModelStatus("a")) == 26
    assert load_s(ModelPolicy(), ModelStatus("a")) == 1


LEVEL_1 = SleepLevel("1", wake_s=0.5, kept_bytes=GB, host_bytes=8 * GB)


def held(state: ModelState, seen: dict[int, int], claim: int = 0, **changes: str) -> Holding:
    settings = ModelPolicy(claim_bytes=claim, sleep_levels=(LEVEL_1,))
    status = ModelStatus("a", state, placed_on=(0, 1), held_bytes=seen, **changes)  # type: ignore[arg-type]
    return holding(settings, status, Need("a", 8 * GB, 2))


def test_a_loading_model_holds_what_it_will_need_or_more() -> None:
    assert held(ModelState.LOADING, {0: GB, 1: 9 * GB}).bytes == {0: 8 * GB, 1: 9 * GB}


def test_a_ready_model_holds_what_the_driver_sees_and_at_least_its_claim() -> None:
    assert held(ModelState.READY, {0: GB, 1: 9 * GB}).bytes == {0: GB, 1: 9 * GB}
    assert held(ModelState.READY, {0: GB, 1: 9 * GB}, claim=8 * GB).bytes == {0: 8 * GB, 1: 9 * GB}
    assert held(ModelState.DRAINING, {}).bytes == {0: 8 * GB, 1: 8 * GB}


def test_a_sleeper_of_no_known_level_holds_all_of_it_as_it_may_be_waking() -> None:
    assert held(ModelState.ASLEEP, {}).bytes == {0: 8 * GB, 1: 8 * GB}


def test_a_sleeper_holds_what_the_driver_sees_or_its_level_keeps() -> None:
    kept = {0: GB, 1: GB, HOST: 8 * GB}
    assert held(ModelState.ASLEEP, {}, sleep_level="1").bytes == kept
    assert held(ModelState.ASLEEP, {0: 3 * GB}, sleep_level="1").bytes == {**kept, 0: 3 * GB}


def test_a_drained_model_holds_nothing_or_what_its_level_keeps() -> None:
    settings, status = ModelPolicy(sleep_levels=(LEVEL_1,)), ModelStatus("a", placed_on=(0,))
    assert holding_after_drain(settings, status, "").bytes == {}
    assert holding_after_drain(settings, status, "1").bytes == {0: GB, HOST: 8 * GB}


def test_what_is_free_is_what_neither_models_nor_strangers_have() -> None:
    holdings = {"a": Holding({0: 8 * GB}), "b": Holding({1: GB})}
    assert free_bytes(gpus(24, foreign=(3,))[0], holdings) == 13 * GB
    assert has_room(Need("c", 13 * GB), gpus(24, foreign=(3,))[0], holdings)
    assert not has_room(Need("c", 13 * GB + 1), gpus(24, foreign=(3,))[0], holdings)


def test_an_exclusive_model_and_another_do_not_share_a_gpu() -> None:
    shared, alone = {"a": Holding({0: GB})}, {"a": Holding({0: GB}, is_exclusive=True)}
    assert not has_room(Need("b", GB, is_exclusive=True), gpus(24)[0], shared)
    assert not has_room(Need("b", GB), gpus(24)[0], alone)
    assert has_room(Need("b", GB, is_exclusive=True), gpus(24, 24)[1], shared)
    host = Device(HOST, 24 * GB)
    assert has_room(Need("b", GB, devices=0), host, {"a": Holding({HOST: GB}, is_exclusive=True)})


def test_nothing_goes_where_it_may_not() -> None:
    assert not has_room(Need("a", GB, allowed=frozenset({1})), gpus(24)[0], {})
    assert not has_room(Need("a", GB), Device(0, 24 * GB, unusable="reserved"), {})
    assert not has_room(Need("a", GB), Device(HOST, 24 * GB), {})
    assert not has_room(Need("a", GB, devices=0), gpus(24)[0], {})


def test_amounts_are_said_in_gb_or_mb() -> None:
    assert (gb(13_400_000_000), gb(98_000_000)) == ("13.4 GB", "98 MB")
