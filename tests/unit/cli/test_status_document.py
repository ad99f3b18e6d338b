"""What ``dynaplan status`` shows of a worker."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import click
import pytest

from dynaplan.cli import status_document
from dynaplan.cli.status_document import (
    DeploymentState,
    illness_lines,
    is_lost,
    learnt_lines,
    read_draining,
    routing_lines,
    unmanaged_row,
    unreachable_notes,
    uptime_s,
    worker_row,
)
from dynaplan.cli.status_view import COLUMNS, render_worker_table, table_rows
from dynaplan.contract.gpu_standing import GpuStanding, GpuStandings
from dynaplan.contract.gpus import Gpu
from dynaplan.contract.model_keys import MODEL_MEMORY, ModelReport
from dynaplan.engines.timing_model.learnt_timing import UNKNOWN_MACHINE, LearntTiming, describe
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role, Worker, WorkerEvent, WorkerState
from dynaplan.http.client import WholeAnswer
from dynaplan.http.messages import Headers
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.process import process_table
from dynaplan.process.heartbeats import Heartbeat
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import DRAINING, READY, STARTING, worker


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_document.time, "monotonic", lambda: 123.0)


def table(of: list[dict[str, Any]], width: int = 0) -> str:
    return render_worker_table(table_rows(of), table_rows(of, is_short=True), width)


def row(of: Worker, usually_s: float | None = None, load: WorkerLoad | None = None) -> dict[str, Any]:
    return worker_row(of, load, usually_s)


def state_shown(of: dict[str, Any]) -> str:
    _, line = click.unstyle(table([of])).splitlines()
    return line.removeprefix(f"{of['worker']}  {of['role']}").strip().partition("   ")[0].partition("  -")[0]


def test_a_worker_whose_engine_starts_is_loading() -> None:
    starting = replace(worker("VllmWorker", STARTING), since_s=100.0)
    assert state_shown(row(starting)) == "loading 00:23"
    assert state_shown(row(starting, 41.2)) == "loading 00:23 (usually 00:41)"
    document = row(starting, 41.2)
    assert (document["state"], document["loading_s"], document["usually_s"]) == ("starting", 23.0, 41.2)


@pytest.mark.parametrize(("state", "shown"), [(READY, "ready"), (DRAINING, "draining 00:23")])
def test_no_other_worker_is(state: Any, shown: str) -> None:
    document = row(replace(worker("VllmWorker", state), since_s=100.0), 41.2)
    assert (document["loading_s"], document["usually_s"]) == (None, None)
    assert state_shown(document) == shown


def test_a_worker_that_lost_its_registration_is_not_loading_but_says_so() -> None:
    ready = replace(worker("VllmWorker"), url="http://127.0.0.1:1")
    lost = row(ready.after(WorkerEvent.UNREGISTERED, 100.0), 41.2)
    assert (lost["loading_s"], lost["reason"]) == (None, "its registration is gone")
    assert state_shown(lost) == "starting"
    assert is_lost(lost)


async def test_a_worker_that_somebody_told_to_leave_is_draining_and_another_that_is_lost_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"http://drains": WholeAnswer(503, Headers(()), b'{"status": "draining"}'), "http://hangs": None}

    async def get(url: str, *, timeout_s: float) -> WholeAnswer | None:
        return said[url.removesuffix("/health")]  # a ready worker, or one without an address, is not asked

    monkeypatch.setattr(status_document, "try_get", get)
    ready = replace(worker("VllmWorker"), pid=7, url="http://ready")
    drains, hangs = (replace(ready.after(WorkerEvent.UNREGISTERED, 100.0), name=url, url=url) for url in said)
    assert await read_draining([ready, drains, hangs, worker("VllmWorker", STARTING)]) == {"http://drains"}
    shown = worker_row(replace(drains, pid=0), None, 41.2, is_draining=True)
    assert state_shown(shown).startswith("draining ")
    assert shown["reason"] == status_document.EXTERNAL_DRAIN_REASON
    assert not is_lost(shown)


def test_a_frontend_loads_nothing() -> None:
    frontend = row(Worker("ns_Frontend", "Frontend", Role.FRONTEND, since_s=100.0))
    assert frontend["loading_s"] is None
    assert not is_lost(frontend)


def test_an_engine_that_does_not_tell_its_blocks_still_shows_its_requests() -> None:
    load = WorkerLoad(running_requests=3, waiting_requests=1, kv_usage=0.25)
    line = table([row(worker("VllmWorker"), load=load)]).splitlines()[1]
    assert line.split()[-5:] == ["3", "1", "25.0%", "-", "0"]


def test_a_worker_whose_process_is_gone_is_dead_whatever_the_statefile_says() -> None:
    gone = row(replace(worker("VllmWorker", READY), pid=2**22 + 1, started_at=1))
    assert (gone["state"], gone["is_alive"], state_shown(gone)) == ("ready", False, "dead")


def test_silent_processes_of_the_deployment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaplan.process.heartbeats import HeartbeatFiles

    me = ProcessIdentity(7, 1, "boot")
    last_beats = {
        "serve": Heartbeat(me, 0.0, 2.0, 1.0, True),
        "fleet-plugin": Heartbeat(me, 0.0, 40.0, 1.0, True),
        "ns_Planner": Heartbeat(me, 0.0, 0.0, 1.0, False),
    }
    monkeypatch.setattr(HeartbeatFiles, "of", lambda _: SimpleNamespace(read=last_beats.get))
    planner = Worker("ns_Planner", "Planner", Role.PLANNER, since_s=0.0)
    found: Any = SimpleNamespace(runtime_dir="/x", arbiter=me, workers=(planner,), document={})
    assert [each.partition(".")[0] for each in status_document._troubles(found)] == [
        "the fleet plugin (pid 7) has not answered for 40 s",
        "the planner ns_Planner (pid 7) has ended",
    ]


def test_a_serve_that_its_supervisor_starts_again_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaplan.process.heartbeats import HeartbeatFiles

    heartbeat = Heartbeat(ProcessIdentity(8, 1, "boot"), 0.0, 1.0, 1.0, False)
    monkeypatch.setattr(HeartbeatFiles, "of", lambda _: SimpleNamespace(read={"serve": heartbeat}.get))
    supervisor = ProcessIdentity(7, 1, "boot")
    found: Any = SimpleNamespace(runtime_dir="/x", arbiter=supervisor, workers=(), document={})
    [trouble] = status_document._troubles(found)
    assert (
        trouble == "`dynaplan serve` (pid 8) has ended. Its supervisor starts it again, and requests go on."
    )


def test_a_narrow_screen_does_without_the_usual_time_first_and_then_without_columns() -> None:
    loading = row(replace(worker("VllmWorker", STARTING), since_s=100.0), 41.2)
    whole = click.unstyle(table([loading]))
    wide = click.unstyle(table([loading], 200))
    narrow = click.unstyle(table([loading], len(whole.splitlines()[1]) - 1))
    assert wide == whole
    assert "usually" not in narrow
    assert narrow.splitlines()[0].split() == list(COLUMNS)
    narrower = click.unstyle(table([loading], 60))
    assert "PID" not in narrower.splitlines()[0]
    assert "--json" in narrower
    assert max(map(len, narrower.splitlines())) <= 60


@pytest.mark.parametrize(("state", "colour"), [(READY, "green"), (DRAINING, "yellow")])
def test_a_state_has_its_colour(state: Any, colour: str) -> None:
    begun = click.style(state.value, fg=colour, reset=False)
    assert begun in table([row(worker("VllmWorker", state))])


def unmanaged(network: str) -> Instance:
    card = {"role": "decode", "gpus": [3]}
    return Instance(
        *("box", "VllmWorker", "generate", 5, "http://127.0.0.1:9"),
        worker="box_VllmWorker_gpu1_77",
        pid=os.getpid(),
        card=card,
        host="gpu1",
        network=network,
        is_managed=False,
    )


def test_a_row_has_the_keys_of_a_managed_workers() -> None:
    row = unmanaged_row(unmanaged(process_table.network()), WorkerLoad())
    managed = worker_row(worker("VllmWorker"), None, None)
    assert managed.keys() <= row.keys()
    assert (row["role"], row["state"], row["gpus"], row["is_managed"]) == ("decode", "ready", [3], False)
    assert (row["running"], row["host"]) == (0, "gpu1")
    assert row["uptime_s"] > 0
    assert "box_VllmWorker_gpu1_77" in table([row])


def test_the_age_of_a_process_of_another_host_is_not_known() -> None:
    row = unmanaged_row(unmanaged("another boot/1"), None)
    assert (row["uptime_s"], row["running"]) == (None, None)
    assert uptime_s(0) is None


def test_decode_workers_that_prefill_workers_cannot_reach_are_named() -> None:
    decode = unmanaged("here")
    prefill = replace(decode, card={"role": "prefill"}, network="there")
    (line,) = unreachable_notes([decode, prefill])
    assert line.startswith("box_VllmWorker_gpu1_77 computes prompts itself")
    assert unreachable_notes([decode, replace(prefill, network="here")]) == []
    assert unreachable_notes([decode]) == []


def test_workers_that_tell_are_named_together_and_others_with_the_reason() -> None:
    known = {
        "w1": {"f": "events", "g": "events"},
        "w0": {"f": "events"},
        "w2": {"f": "prediction: no tokens", "g": "prediction: no tokens"},
        "w3": {"f": "events", "g": "prediction: events are missing"},
    }
    assert routing_lines(known) == [
        "routed by what its engine says it has cached: w0, w1",
        "w2 is routed by prediction: no tokens",
        "w3 is routed by events (at f); prediction: events are missing (at g)",
    ]


def test_other_modes_say_nothing() -> None:
    assert routing_lines({}) == []


def test_the_memory_that_models_share_is_divided_by_model_and_only_where_models_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_document, "gpus_of", lambda found: (Gpu(1, "GPU-1"),))
    shared = [{"index": index, "total_bytes": 24, "foreign_bytes": 3} for index in (-1, 0, 1)]
    on_gpu = replace(worker("VllmWorker", gpus=(1,)), memory_bytes=7)
    on_host = replace(worker("VllmWorker_1"), component="bee", memory_bytes=5)
    gone = replace(on_gpu, state=WorkerState.FAILED)
    found: Any = SimpleNamespace(workers=[on_gpu, on_gpu, on_host, gone])
    reports = {"ant": ModelReport("VllmWorker", "ready"), "bee/1": ModelReport("bee", "ready")}
    answers = DeploymentState(fleet={MODEL_MEMORY: [*shared, {"index": "x"}, 7]})
    divided = status_document._model_memory(found, answers, reports)
    assert [(row["index"], row["by_model"]) for row in divided] == [(-1, {"bee/1": 5}), (1, {"ant": 14})]


def test_a_gpu_that_is_set_apart_says_why_since_when_and_how_it_comes_back() -> None:
    apart = GpuStanding(why="Xid 79", since_unix_s=1.0)
    last = GpuStanding(is_apart=False, why="Xid 48")
    well = GpuStanding(is_apart=False)
    first, second = illness_lines(GpuStandings({0: apart, 1: last, 2: well}))
    assert first.startswith("GPU 0 is set apart: Xid 79 (1970-01-0")
    assert first.endswith("`dynaplan gpus --readmit 0` takes it back.")
    assert second.startswith("GPU 1 is ill: Xid 48. It stays in use: no other is left")
    hot = GpuStanding(why="90 C", since_unix_s=1.0, retry_unix_s=61.0)
    assert ": tried again at 1970-01-0" in illness_lines(GpuStandings({3: hot}))[0]


@pytest.mark.parametrize("error", [0.04, 0.5])
def test_what_the_last_decision_knew_of_the_steps_is_said_in_the_words_of_why(error: float) -> None:
    known = LearntTiming(UNKNOWN_MACHINE, UNKNOWN_MACHINE, error, equations=60, steps=9253, largest_batch=4)
    (line,) = learnt_lines({"observation": {"learnt": LearntTimings(known, is_needed=True).to_json()}})
    assert line.startswith(f"decode workers: {describe(known)}")
    assert ("nothing leaves" in line) == (error > 0.15)


@pytest.mark.parametrize("record", [{}, {"observation": {}}, {"observation": {"learnt": {"decode": 1}}}])
def test_a_record_without_it_says_nothing(record: dict[str, Any]) -> None:
    assert learnt_lines(record) == []
