"""Counts and holds in the store: one transaction, tried again when somebody else was faster."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import running_deployment, scale_counts
from dynaplan.cli.scale_counts import (
    ScaleTimes,
    describe_next_decision,
    expected_times,
    left_out_gpus,
    progress_watcher,
    published_fleet,
    statefile_holds,
    wait_limit_s,
    write_counts,
)
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts, scaling_key
from dynaplan.fleet import scale_progress
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.startup_times import StartupTimesFile, startup_key
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import TemporaryError
from dynaplan.util.progress import ProgressLine
from tests.fakes.clock import LoopClock
from tests.unit.fleet.rules.graphs import DRAINING, READY, STARTING, worker
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.situations import interval

AT_2 = RoleHolds(decode=Hold(2, 2))


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore(LoopClock())
    for name, value in {"num_decode_workers": "1", "decision_id": "3", "scaled_decision_id": "7"}.items():
        await store.put(f"v1/ns/planner/{name}", value)
    return store


async def value(store: MemoryStore, name: str) -> str:
    item = await store.get(scaling_key("ns", name))
    return item.value if item else ""


async def test_counts_and_holds_are_written_together_above_every_id(store: MemoryStore) -> None:
    written = await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 2}, AT_2))
    assert (written.decision_id, written.holds_before, written.holds) == (8, RoleHolds(), AT_2)
    assert written.counts == DesiredCounts(-1, 2, 8, 7)
    assert await value(store, "num_decode_workers") == "2"
    assert RoleHolds.from_text(await value(store, "holds")) == AT_2


async def test_a_release_is_no_new_decision_and_leaves_an_empty_value(store: MemoryStore) -> None:
    await store.put("v1/ns/planner_extensions/holds", AT_2.to_text())
    written = await write_counts(store, "ns", lambda now, holds: ({}, RoleHolds()))
    assert written.holds_before == AT_2
    assert await value(store, "holds") == "{}"
    assert await value(store, "decision_id") == "3"


async def test_holds_that_are_over_or_cannot_be_read_count_as_none(store: MemoryStore) -> None:
    for text in ('{"decode": 7}', RoleHolds(decode=Hold(2, until_s=time.time() - 1)).to_text()):
        await store.put("v1/ns/planner_extensions/holds", text)
        written = await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 2}, holds))
        assert written.holds_before == RoleHolds()
        assert await value(store, "holds") == "{}"


async def test_a_hold_made_meanwhile_is_seen_by_the_next_attempt(store: MemoryStore) -> None:
    seen = []

    def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        seen.append(holds)
        return {Role.DECODE: 3}, holds

    commit = store.commit

    async def overtaken(transaction):
        store.commit = commit
        await store.put("v1/ns/planner_extensions/holds", AT_2.to_text())
        return await commit(transaction)

    store.commit = overtaken
    await write_counts(store, "ns", change)
    assert seen == [RoleHolds(), AT_2]


async def test_it_gives_up_when_the_counts_change_all_the_time(store: MemoryStore) -> None:
    async def never(_):
        return False

    store.commit = never
    with pytest.raises(TemporaryError, match="somebody else"):
        await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 3}, holds))


async def test_the_published_fleet_is_read_and_a_spoilt_one_is_none(store: MemoryStore) -> None:
    assert await published_fleet(store, "ns") is None
    await store.put("v1/ns/fleet", "[]")
    assert await published_fleet(store, "ns") is None
    await store.put("v1/ns/fleet", '{"gpus_total": 8}')
    fleet = await published_fleet(store, "ns")
    assert fleet
    assert fleet.gpus_total == 8


async def test_gpus_that_are_left_out_are_read_with_the_reason(store: MemoryStore) -> None:
    for text, lines in (
        ("[]", ()),
        ('{"gpus_left_out": 5}', ()),
        ('{"gpus_left_out": ["GPU 2: x"]}', ("GPU 2: x",)),
    ):
        await store.put("v1/ns/fleet", text)
        assert await left_out_gpus(store, "ns") == lines


def test_the_statefile_tells_holds_when_the_store_does_not_answer() -> None:
    assert statefile_holds({}) == RoleHolds()
    assert statefile_holds({"planner_keys": {"holds": AT_2.to_text()}}) == AT_2
    assert statefile_holds({"planner_keys": {"holds": 7}}) == RoleHolds()


TIMES = ScaleTimes(125.0, 600.0)
ONE = worker("VllmWorker", READY)


def found(*workers: Worker) -> Any:
    return SimpleNamespace(workers=workers, statefile=Path("/nonexistent"), runtime_dir=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("times", "starts", "leaves", "longest"),
    [
        (TIMES, True, False, 375.0),
        (TIMES, False, True, 610.0),
        (TIMES, True, True, 985.0),
        (TIMES, False, False, 120.0),
        (ScaleTimes(2.0, 30.0), True, False, 120.0),
        (ScaleTimes(None, 30.0), True, False, 600.0),
    ],
)
def test_three_usual_starts_and_a_drain_are_waited_for(
    times: ScaleTimes, starts: bool, leaves: bool, longest: float
) -> None:
    assert times.limit_s(starts=starts, leaves=leaves) == longest


@pytest.mark.parametrize(
    ("workers", "wanted", "longest"),
    [
        ((ONE,), 2, 375.0),
        ((ONE,), 1, 120.0),
        ((replace(ONE, state=STARTING),), 1, 375.0),
        ((ONE, worker("VllmWorker_1", READY)), 1, 610.0),
        ((ONE, worker("VllmWorker_1", DRAINING)), 2, 985.0),
    ],
)
def test_the_workers_of_now_tell_whether_some_start_or_leave(
    workers: tuple[Worker, ...], wanted: int, longest: float
) -> None:
    assert wait_limit_s(found(*workers), {Role.DECODE: wanted}, TIMES) == longest


def test_without_the_launch_nothing_is_learnt() -> None:
    assert expected_times(found(ONE), {Role.DECODE: 2}) == ScaleTimes(None, 600.0)


def test_the_learnt_time_of_the_engine_and_its_drain_deadline_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"model": "m", "engine": "sim", "drain-deadline": 45}
    key = startup_key(ONE, settings)
    launch = SimpleNamespace(
        settings_of=lambda _: settings, leave_timeout_of=lambda _: 45.0, leave_timeout_s=600.0
    )
    (tmp_path / "launch.json").write_text("{}")
    monkeypatch.setattr(Launch, "from_json", lambda _: launch)
    monkeypatch.setattr(
        StartupTimesFile, "beside", lambda _: SimpleNamespace(read=lambda: {key: [100.0, 125.0, 130.0]})
    )
    deployment = found(ONE)
    deployment.runtime_dir = tmp_path
    assert expected_times(deployment, {Role.DECODE: 2}) == ScaleTimes(125.0, 45.0)


def test_the_progress_tells_what_is_missing_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(scale_counts.time, "monotonic", lambda: now_s[0])
    shown = io.StringIO()
    watch = progress_watcher(TIMES, ProgressLine(shown, 30.0, lambda: now_s[0]))
    starting = worker("VllmWorker_1", STARTING)
    for at_s, workers in (
        (1.0, (ONE, starting)),
        (2.0, (ONE, starting)),
        (130.0, (ONE, starting)),
        (131.0, (ONE, replace(starting, state=READY))),
        (132.0, (ONE, worker("VllmWorker_1", READY), worker("VllmWorker_2", DRAINING))),
    ):
        now_s[0] = at_s
        watch(scale_progress.measure_progress({Role.DECODE: 2}, workers))
    first, late, draining = shown.getvalue().splitlines()
    assert first == "00:01, about 02:04 left: 1 of 2 decode workers ready, dynamo_VllmWorker_1 starting"
    assert late.startswith("02:10, usually 02:05: ")
    assert draining.startswith("02:12, at most 07:48 left: ")


SETTINGS = PlannerSettings(adjustment_interval_s=10.0)
TWO = DesiredCounts(-1, 2, 2, 1)


def record(settings: PlannerSettings, ago_s: float = 3.0, **changes: Any) -> dict[str, Any]:
    """What the planner wrote down of an interval with one idle decode worker."""
    seen = replace(interval(0, 1, kv=0.0), **changes)
    model = targets.model() if settings.is_by_targets else None
    state, decision = decide(settings, PlannerState(), seen, model)
    at = datetime.now().astimezone() - timedelta(seconds=ago_s)
    return DecisionRecord(at.isoformat(), settings, PlannerState(), seen, decision, state).to_json()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Write a record as the last one, and return the sentence."""

    def say(document: dict[str, Any] | None, settings: PlannerSettings = SETTINGS, **options: Any) -> str:
        documents = [] if document is None else [document]
        monkeypatch.setattr(running_deployment, "recent_records", lambda directory, last, since_s: documents)
        found: Any = SimpleNamespace(log_dir=tmp_path, began_s=0.0)
        return describe_next_decision(found, settings, TWO, options.pop("holds", RoleHolds()), **options)

    return say


def test_it_says_what_the_planner_would_ask_for_and_why(said) -> None:
    assert said(record(SETTINGS)) == (
        "The planner decides again 10 s after this is carried out. With the load that it saw last it would "
        "ask for decode=1: the mean KV usage 0 is below 0.5: one decode worker fewer."
    )


def test_it_says_that_a_number_would_be_kept(said) -> None:
    sentence = said(record(SETTINGS), holds=RoleHolds(decode=Hold(2)))
    assert sentence.endswith("it would keep that, and may change it later.")


def test_after_a_release_the_next_decision_comes_with_the_interval(said) -> None:
    assert "decides again in 7 s." in said(record(SETTINGS), is_decision=False)
    assert "decides again within 10 s." in said(record(SETTINGS, ago_s=60.0), is_decision=False)


def test_targets_are_planned_for_in_even_intervals(said) -> None:
    settings = replace(targets.SETTINGS, adjustment_interval_s=10.0)
    assert "decides again in 7 s. With the load" in said(record(settings), settings)


@pytest.mark.parametrize("document", [None, {}, {"wall_time": 7}])
def test_without_a_record_it_says_only_when(said, document: dict[str, Any] | None) -> None:
    assert said(document) == (
        "The planner decides again 10 s after this is carried out, and may change that."
    )


def test_an_interval_in_which_nothing_was_known_and_a_profile_that_is_gone_tell_nothing(said) -> None:
    assert said(record(SETTINGS, unknown="the store is away")).endswith(", and may change that.")
    settings = replace(targets.SETTINGS)
    document = record(settings)
    document["settings"]["profile-results-dir"] = "/nowhere"
    assert said(document, settings).endswith(", and may change that.")
