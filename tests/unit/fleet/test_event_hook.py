"""Events are told to a hook, seldom enough, and nothing that it does holds anything up."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dynaplan.cli import serve
from dynaplan.contract.model_keys import ModelEvent
from dynaplan.fleet import event_hook
from dynaplan.fleet.event_hook import (
    MIN_INTERVAL_S,
    ON_EVENT_VARIABLE,
    EventHook,
    EventWatch,
    HookEvent,
    check_hook,
)
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.planner import decision_events
from dynaplan.planner.decision_events import RecordedDecisionEvents
from dynaplan.util.errors import ConfigError
from tests.fakes.clock import ManualClock


def worker(name: str, state: WorkerState) -> Worker:
    return Worker(name, "VllmWorker", Role.DECODE, state, reason="it crashed")


def record(at: str, before: float = 5.0, after: float = 4.0) -> dict[str, Any]:
    budgets = ({"error_budget": {"ttft_requests": each, "itl_requests": 1.0}} for each in (before, after))
    return dict(zip(("wall_time", "state", "next_state"), (at, *budgets), strict=True))


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/x", "https://host/x?a=b", "sh -c 'cat > told'"])
def test_an_address_or_a_program_that_is_there_does_not_raise(target: str) -> None:
    check_hook(target)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("http:/x", "no address of a web server"),
        ("https://", "no address of a web server"),
        ("http://[", "no address of a web server"),
        ("ftp://host/x", "no address of a web server"),
        ("no-such-program -v", "no program 'no-such-program'"),
        ("say 'it", "No closing quotation"),
        (" ", "no program ''"),
    ],
)
def test_what_could_not_be_called_is_refused_before_anything_starts(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_hook(target)


def test_a_worker_that_has_failed_is_one_event_and_what_was_so_before_is_none() -> None:
    fleet = [worker("old", WorkerState.FAILED), worker("w", WorkerState.READY)]
    watch = EventWatch(lambda: fleet, RecordedDecisionEvents(list))
    assert watch.poll() == []
    fleet[1] = worker("w", WorkerState.FAILED)
    assert watch.poll() == [HookEvent("failed", "w has failed: it crashed")]
    assert watch.poll() == []
    fleet[1] = worker("w", WorkerState.STARTING)
    watch.poll()
    fleet[1] = worker("w", WorkerState.FAILED)
    assert len(watch.poll()) == 1


def test_what_is_decided_of_a_model_is_an_event_once() -> None:
    before, after = (
        ModelEvent(1.0, "ant", "load: asked"),
        ModelEvent(2.0, "bee", "unload: makes room for ant"),
    )
    events = [before]
    watch = EventWatch(list, RecordedDecisionEvents(list), lambda: events)
    assert watch.poll() == []
    events.append(after)
    assert watch.poll() == [HookEvent("model", "bee: unload: makes room for ant")]
    events.remove(before)
    assert watch.poll() == []


def test_a_budget_that_is_used_up_is_a_missed_target_once() -> None:
    records = [record("2026-01-01T00:00:00", 5.0, -1.0)]
    watch = EventWatch(list, RecordedDecisionEvents(lambda: records))
    assert watch.poll() == []
    records.append(record("2026-01-01T00:00:30", 5.0, -3.0))
    (event,) = watch.poll()
    assert (event.kind, event.text[:24]) == ("target_missed", "the target of TTFT: 3 mo")
    records.append(record("2026-01-01T00:01:00", -3.0, -4.0))
    assert watch.poll() == []


def test_the_hour_that_comes_twice_at_the_end_of_summer_time_has_its_events() -> None:
    records = [record("2026-10-25T02:59:45+02:00")]
    watch = EventWatch(list, RecordedDecisionEvents(lambda: records))
    assert watch.poll() == []
    records.append(record("2026-10-25T02:00:15+01:00", 5.0, -3.0))
    assert [event.kind for event in watch.poll()] == ["target_missed"]


def test_a_change_is_an_event_unless_the_planner_only_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_events, "is_change", lambda record: True)
    monkeypatch.setattr(decision_events, "summarize", lambda record: "changed")
    records: list[dict[str, Any]] = [{"wall_time": None}]
    watch = EventWatch(list, RecordedDecisionEvents(lambda: records))
    watch.poll()
    at = [f"2026-01-01T00:00:0{second}+00:00" for second in (1, 2, 3)]
    records += [record(at[0]), {**record(at[1]), "settings": {"no-operation": True}}, {"wall_time": at[2]}]
    assert watch.poll() == [HookEvent("scaled", "changed"), HookEvent("scaled", "changed")]


class Found:
    """A watch that finds what it is given."""

    def __init__(self) -> None:
        self.events: list[HookEvent] = []

    def poll(self) -> list[HookEvent]:
        found, self.events = self.events, []
        return found


def hook(target: str) -> tuple[EventHook, Any, ManualClock]:
    found: Any = Found()
    clock = ManualClock()
    return EventHook(target, "ns", found, clock), found, clock


def teller(tmp_path: Path, more: str = "") -> str:
    """A command that notes what it is told."""
    script = tmp_path / "tell.py"
    script.write_text(
        "import os, sys\n"
        f"with open({str(tmp_path / 'told')!r}, 'a') as file:\n"
        "    file.write(sys.stdin.read() + '\\n')\n"
        "    assert os.environ['DYNAPLAN_EVENT'] == 'failed'\n"
        "    assert 'DYNAPLAN_WORKER_TOKEN' not in os.environ\n" + more
    )
    return f"{sys.executable} {script}"


def told(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


async def test_events_of_one_kind_are_told_together_and_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "secret")
    own, found, clock = hook(teller(tmp_path))
    found.events = [HookEvent("failed", "one")]
    await own.poll()
    found.events = [HookEvent("failed", "two"), HookEvent("failed", "three")]
    await own.poll()
    assert [each["texts"] for each in told(tmp_path)] == [["one"]]
    clock.advance(MIN_INTERVAL_S)
    await own.poll()
    assert told(tmp_path)[1] == {"event": "failed", "namespace": "ns", "count": 2, "texts": ["two", "three"]}
    assert caplog.records == []


async def test_a_hook_that_fails_is_one_line_without_its_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, found, _ = hook(f"{teller(tmp_path, 'sys.exit(3)')} s3cr3t")
    found.events = [HookEvent("failed", "one")]
    with caplog.at_level(logging.WARNING):
        await own.poll()
    assert [each.message for each in caplog.records] == [
        f"--on-event: {sys.executable} failed, for failed: exit code 3"
    ]


async def test_a_program_that_is_not_there_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    own, found, _ = hook("/nowhere/program s3cr3t")
    found.events = [HookEvent("failed", "one")]
    await own.poll()
    assert [each.message for each in caplog.records] == [
        "--on-event: /nowhere/program failed, for failed: FileNotFoundError"
    ]


async def test_a_hook_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_hook, "CALL_TIMEOUT_S", 0.2)
    own, found, _ = hook(f"{sys.executable} -c 'import time; time.sleep(600)'")
    found.events = [HookEvent("failed", "one")]
    await own.poll()
    assert "has not ended within 0.2 s" in caplog.records[0].message


async def test_a_url_gets_the_event_by_post_and_is_not_in_the_log_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies: list[Any] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=200 if len(bodies) == 1 else 500)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        own, found, clock = hook(f"http://127.0.0.1:{runner.addresses[0][1]}/s3cr3t")
        for _ in range(2):
            found.events = [HookEvent("failed", "one")]
            await own.poll()
            clock.advance(MIN_INTERVAL_S)
    finally:
        await runner.cleanup()
    assert bodies[0]["texts"] == ["one"]
    assert [each.message for each in caplog.records] == [
        "--on-event: 127.0.0.1 failed, for failed: it answers 500"
    ]


def test_the_option_and_the_hook_mean_the_same_variable() -> None:
    assert serve.ON_EVENT_VARIABLE == ON_EVENT_VARIABLE
