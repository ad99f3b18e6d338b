"""When a GPU is ill, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.contract.gpu_standing import GpuStanding, GpuStandings
from dynaplan.contract.gpus import GpuHealth
from dynaplan.fleet.rules.gpu_health import (
    DEATHS,
    FIRST_RETRY_S,
    HOT_S,
    LONGEST_RETRY_S,
    SLOW_S,
    HealthJudge,
    Symptom,
    changes,
    judged,
)
from tests.unit.fleet.rules.graphs import BACKOFF, READY, worker

WELL = GpuHealth(celsius=60.0, slowdown_celsius=87.0, utilisation=0.9, clock_mhz=1900, max_clock_mhz=1980)
HOT, SLOW = replace(WELL, celsius=88.0), replace(WELL, clock_mhz=345)
XID = Symptom("xid 79 1", "Xid 79, it has fallen off the bus")
HEAT = Symptom("hot", "88 C", passes=True)
NONE = GpuStandings()
FOUR = (0, 1, 2, 3)


def symptom(*readings: tuple[float, GpuHealth]) -> str:
    """Why the GPU is ill after these readings, each at its time; empty when it is well."""
    judge, found = HealthJudge(), {}
    for now_s, reading in readings:
        found = judge.symptoms({0: reading}, (), now_s)
    return found[0].why if found else ""


@pytest.mark.parametrize(
    ("reading", "why"),
    [
        (WELL, ""),
        (GpuHealth(), ""),
        (replace(WELL, is_lost=True), "it has fallen off the bus"),
        (replace(WELL, xids=(31, 79)), "Xid 79, it has fallen off the bus"),
        (replace(WELL, xids=(13, 31, 43, 45, 63, 94)), ""),
        (replace(WELL, has_remap_failed=True), "a row of its memory could not be remapped"),
        (replace(WELL, uncorrected_errors=2), "2 uncorrected errors of its memory (ECC)"),
    ],
)
def test_what_the_driver_counts_is_a_symptom_unless_a_program_has_caused_it(
    reading: GpuHealth, why: str
) -> None:
    assert symptom((0.0, reading)) == why


def test_heat_and_a_low_clock_at_work_are_symptoms_when_they_last() -> None:
    assert symptom((0.0, HOT)) == ""
    assert symptom((0.0, HOT), (HOT_S, HOT)) == "88 C, and it is slowed down at 87 C"
    assert symptom((0.0, HOT), (HOT_S, replace(HOT, celsius=84.0)))  # not cool enough to be well
    assert symptom((0.0, HOT), (5.0, WELL), (HOT_S, HOT)) == ""
    assert symptom((0.0, SLOW), (SLOW_S, SLOW)) == "at work its clock stays at 345 of 1980 MHz"
    for explained in (replace(SLOW, is_throttled=True), replace(SLOW, utilisation=0.1)):
        assert symptom((0.0, explained), (SLOW_S, explained)) == ""


def ends(times: int, *others: str, on: int = 0) -> dict[int, Symptom]:
    judge, dying = HealthJudge(), worker("VllmWorker", gpus=(on,))
    for time in range(times):
        judge.note_ends([dying], {dying.name: replace(dying, state=BACKOFF)}, float(time))
    fleet = [worker(name, READY, (index,)) for index, name in enumerate(others, 1)]
    return judge.symptoms({}, fleet, float(times))


def test_a_gpu_on_which_engines_end_while_they_live_on_others_is_ill() -> None:
    assert ends(DEATHS - 1, "VllmWorker_1") == {}
    assert ends(DEATHS) == {}  # nothing says that another GPU is better
    assert ends(DEATHS, "PrefillWorker") == {}
    assert ends(DEATHS, "VllmWorker_1")[0].why == "3 engines ended on it, and others live on other GPUs"


def test_an_ill_gpu_is_set_apart_and_taken_back_by_a_person_until_it_falls_ill_anew() -> None:
    apart = judged(NONE, {3: XID}, FOUR, 1, 100.0)
    assert apart.apart == {3: "set apart: Xid 79, it has fallen off the bus"}
    assert judged(apart, {3: XID}, FOUR, 1, 900.0) is apart
    assert judged(apart, {}, FOUR, 1, 10**9) is apart
    readmitted = GpuStandings({3: apart.by_gpu[3].readmitted()})
    assert judged(readmitted, {3: XID}, FOUR, 1, 900.0) is readmitted
    assert judged(readmitted, {3: replace(XID, key="xid 79 2")}, FOUR, 1, 900.0).apart.keys() == {3}


def test_heat_that_has_passed_readmits_it_later_each_time() -> None:
    standings, now_s, waited = NONE, 0.0, []
    for _ in range(9):
        standings = judged(standings, {1: HEAT}, FOUR, 1, now_s)
        retry_s = standings.by_gpu[1].retry_unix_s
        assert judged(standings, {}, FOUR, 1, retry_s - 1) is standings
        assert judged(standings, {1: HEAT}, FOUR, 1, retry_s + 1) is standings
        waited.append(retry_s - now_s)
        now_s = retry_s
        standings = judged(standings, {}, FOUR, 1, now_s)
        assert standings.apart == {}
    assert waited[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waited[-1] == LONGEST_RETRY_S


def test_the_last_gpu_is_not_set_apart_and_says_that_it_is_ill() -> None:
    one_left = judged(NONE, {0: XID, 1: XID}, (0, 1), 1, 5.0)
    assert one_left.apart.keys() == {0}
    assert one_left.ill_in_use == {1: XID.why}
    assert changes(NONE, one_left) == [
        "GPU 0 is set apart: Xid 79, it has fallen off the bus. `dynaplan gpus --readmit 0` takes it back.",
        f"GPU 1 is ill ({XID.why}) and stays in use: no other is left for a decode worker.",
    ]
    back = judged(
        GpuStandings({**one_left.by_gpu, 0: one_left.by_gpu[0].readmitted()}), {1: XID}, (0, 1), 1, 6.0
    )
    assert back.apart.keys() == {1}
    assert changes(one_left, back)[1:] == ["GPU 0 is in use again."]
    assert judged(NONE, {0: XID}, FOUR, 4, 5.0).apart == {}  # a worker takes all four


@given(
    st.dictionaries(st.integers(0, 3), st.sampled_from([XID, HEAT])),
    st.dictionaries(st.integers(0, 3), st.sampled_from([XID, HEAT])),
    st.integers(1, 4),
)
def test_as_many_gpus_as_a_worker_takes_are_always_left(
    first: dict[int, Symptom], then: dict[int, Symptom], least: int
) -> None:
    standings = judged(judged(NONE, first, FOUR, least, 1.0), then, FOUR, least, 2.0)
    assert 4 - len(standings.apart) >= least
    assert judged(standings, then, FOUR, least, 3.0) is standings
    assert GpuStandings.from_text(standings.to_text()) == standings


@pytest.mark.parametrize(
    "text", ["[]", '{"x": {}}', '{"0": 1}', '{"0": {"accepted": 1}}', '{"0": {"why": 1}}']
)
def test_what_is_no_standing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        GpuStandings.from_text(text)
    assert GpuStandings.from_text('{"0": {}}').by_gpu == {0: GpuStanding()}
