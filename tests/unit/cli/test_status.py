"""What ``dynaplan status`` shows of a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaplan.cli import status
from dynaplan.domain.lifecycle import Role, Worker
from dynaplan.domain.worker_load import WorkerLoad
from tests.unit.core.fleet.graphs import DRAINING, READY, STARTING, worker


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.time, "monotonic", lambda: 123.0)


def row(of: Worker, usually_s: float | None = None, load: WorkerLoad | None = None) -> dict[str, Any]:
    return status._row(of, load, usually_s)


def state_shown(of: dict[str, Any]) -> str:
    _, line = status.table([of]).splitlines()
    return line.removeprefix(f"{of['worker']}  {of['role']}").strip().partition("   ")[0].partition("  -")[0]


def test_a_worker_whose_engine_starts_is_loading() -> None:
    starting = replace(worker("VllmWorker", STARTING), since_s=100.0)
    assert state_shown(row(starting)) == "loading 00:23"
    assert state_shown(row(starting, 41.2)) == "loading 00:23 (usually 00:41)"
    document = row(starting, 41.2)
    assert (document["state"], document["loading_s"], document["usually_s"]) == ("starting", 23.0, 41.2)


@pytest.mark.parametrize("state", [READY, DRAINING])
def test_no_other_worker_is(state: Any) -> None:
    document = row(replace(worker("VllmWorker", state), since_s=100.0), 41.2)
    assert (document["loading_s"], document["usually_s"]) == (None, None)
    assert state_shown(document) == state.value


def test_a_worker_that_lost_its_registration_is_not_loading_but_says_so() -> None:
    ready = replace(worker("VllmWorker"), url="http://127.0.0.1:1")
    lost = row(ready.moved(STARTING, 100.0, "its registration is gone"), 41.2)
    assert (lost["loading_s"], lost["reason"]) == (None, "its registration is gone")
    assert state_shown(lost) == "starting"
    assert status._is_lost(lost)


def test_a_frontend_loads_nothing() -> None:
    frontend = row(Worker("ns_Frontend", "Frontend", Role.FRONTEND, since_s=100.0))
    assert frontend["loading_s"] is None
    assert not status._is_lost(frontend)


def test_an_engine_that_does_not_tell_its_blocks_still_shows_its_requests() -> None:
    load = WorkerLoad(running_requests=3, waiting_requests=1, kv_usage=0.25)
    line = status.table([row(worker("VllmWorker"), load=load)]).splitlines()[1]
    assert line.split()[-4:] == ["3", "1", "25.0%", "-"]
