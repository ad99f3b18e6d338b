"""``dynaplan scale``: what it asks for before, and what it says afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli import reserve, scale
from dynaplan.cli.main import group
from dynaplan.config.service_config import CONFIG_VARIABLE
from dynaplan.fleet import scale_progress
from dynaplan.fleet.scale_progress import ScaleRequest
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.planner.recorders.manual_changes import manual_changes
from dynaplan.store import connections
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError


def deployment(planner: dict[str, Any] | None) -> Any:
    """A deployment with one decode worker, and a planner with these options."""
    workers = [Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, since_s=0.0)]
    if planner is not None:
        workers.append(Worker("ns_Planner", "Planner", Role.PLANNER, since_s=0.0))
    return SimpleNamespace(
        namespace="ns",
        workers=workers,
        runtime_dir=Path("/nonexistent"),
        document={
            "components": {"ns_VllmWorker": {"component": "VllmWorker", "role": "decode"}},
            "environment": {CONFIG_VARIABLE: json.dumps({"Planner": planner or {}})},
        },
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryStore:
    """The store of a deployment with one decode worker, planned every 10 s."""
    store = MemoryStore(SystemClock())
    found = deployment({"adjustment-interval": 10, "max-gpu-budget": 4})
    found.log_dir, found.began_s = tmp_path, 0.0

    async def counted() -> None:
        for name, value in {"num_decode_workers": "1", "decision_id": "1"}.items():
            await store.put(f"v1/ns/planner/{name}", value)
        await store.put("v1/ns/fleet", FLEET)

    asyncio.run(counted())
    monkeypatch.setattr(store, "close", closed)
    monkeypatch.setattr(scale, "connect", lambda _: found)
    monkeypatch.setattr(scale, "gpus_of", lambda _: (0,))
    monkeypatch.setattr(reserve, "connect", lambda _: found)
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    monkeypatch.setattr(scale_progress, "check_alive", lambda _: None)
    return store


async def closed() -> None:
    """A store that is used again is not closed."""


FLEET = json.dumps({"roles": {"decode": {"ready": 1}}, "gpus_per_worker": {"decode": 1}, "gpus_total": 8})


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(group, arguments)


def asked_for(store: MemoryStore) -> str:
    item = asyncio.run(store.get("v1/ns/planner/num_decode_workers"))
    return item.value if item else ""


@pytest.mark.parametrize("role", ["decode", "VllmWorker"])
def test_the_last_worker_that_answers_goes_only_with_yes(store: MemoryStore, role: str) -> None:
    for arguments in ((f"{role}=0",), (f"{role}=-1",), (role, "--at-most", "0")):
        refused = typed("scale", *arguments)
        assert isinstance(refused.exception, ConfigError)
        assert "--yes" in str(refused.exception)
        assert asked_for(store) == "1"
    assert typed("scale", f"{role}=0", "--yes", "--no-wait").exit_code == 0
    assert asked_for(store) == "0"


def test_the_answer_says_when_the_planner_may_change_it_and_how_to_keep_it(store: MemoryStore) -> None:
    answer = typed("scale", "decode=2", "--no-wait").output
    assert "asked for decode=2 (decision 2)" in answer
    assert "The planner decides again 10 s after this is carried out, and may change that." in answer
    assert "To keep it: `dynaplan scale decode=2 --hold`, or --for 2h." in answer


def test_how_to_keep_several_numbers_names_them_all(store: MemoryStore) -> None:
    found: Any = scale.connect(None)
    found.workers.append(Worker("ns_PrefillWorker", "PrefillWorker", Role.PREFILL, since_s=0.0))
    found.document["components"]["ns_PrefillWorker"] = {"component": "PrefillWorker", "role": "prefill"}
    asyncio.run(store.put("v1/ns/planner/num_prefill_workers", "1"))
    answer = typed("scale", "decode=2", "prefill=2", "--no-wait").output
    assert "To keep it: `dynaplan scale decode=2 prefill=2 --hold`, or --for 2h." in answer


@pytest.mark.parametrize("words", [("decode", "2"), ("VllmWorker", "2"), ("decode", "+1")])
def test_a_number_may_stand_behind_the_role(store: MemoryStore, words: tuple[str, ...]) -> None:
    assert typed("scale", *words, "--no-wait", "--timeout", "3").exit_code == 0
    assert asked_for(store) == "2"


def test_a_number_alone_is_answered_with_the_role(store: MemoryStore) -> None:
    assert "of which role?\n  Write decode=3." in str(typed("scale", "3").exception)


def test_a_hold_with_hours_is_not_one_for_good(store: MemoryStore) -> None:
    refused = typed("scale", "decode=2", "--at", "09:00-17:00", "--hold")
    assert "--hold keeps the number at all hours, --at at some" in str(refused.exception)
    assert asked_for(store) == "1"


def test_a_hold_is_said_with_its_end_and_released_again(store: MemoryStore) -> None:
    answer = typed("scale", "decode=+1", "--for", "2h", "--no-wait").output
    assert asked_for(store) == "2"
    assert "decode is held at 2 by " in answer
    assert "or until `dynaplan release decode`" in answer
    assert "The planner decides" not in answer
    refused = typed("scale", "decode=1")
    assert "decode is held at 2 by" in str(refused.exception)
    released = typed("release").output
    assert released.startswith("released decode: it was held at 2 by")
    assert "The planner decides again within 10 s" in released
    assert typed("release").output == "nothing is held\n"
    assert typed("release", "decode").output == "decode is not held\n"


def test_another_hold_says_what_it_replaces_and_bounds_leave_the_planner_its_part(store: MemoryStore) -> None:
    typed("scale", "decode=3", "--hold", "--no-wait")
    answer = typed("scale", "decode", "--at-most", "2", "--no-wait").output
    assert asked_for(store) == "2"
    assert "decode is held at 2 or fewer by" in answer
    assert "that replaces: decode held at 3 by" in answer
    assert "The planner decides again" in answer
    assert "To keep it" not in answer


def test_a_hold_above_the_gpu_budget_or_the_gpus_is_refused(store: MemoryStore) -> None:
    assert "--Planner.max-gpu-budget=5" in str(typed("scale", "decode=5", "--hold").exception)
    assert "there are 8" in str(typed("scale", "decode=9", "--hold").exception)
    assert asked_for(store) == "1"


@pytest.mark.parametrize("planner", [None, {"no-operation": True}, {"no_operation": True}])
def test_without_a_planner_that_scales_a_number_stays_and_a_hold_waits_for_one(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planner: dict[str, Any] | None
) -> None:
    found = deployment(planner)
    found.log_dir = tmp_path
    monkeypatch.setattr(scale, "connect", lambda _: found)
    assert typed("scale", "decode=2", "--no-wait").output == "asked for decode=2 (decision 2)\n"
    held = typed("scale", "decode=2", "--hold", "--no-wait").output
    assert "No planner scales this deployment now; one that is started keeps to it." in held
    recorded = [each.what for each in manual_changes(tmp_path, 9)]
    assert recorded == ["decode 1 -> 2", "decode 2 again, held at 2 until `dynaplan release`"]


def test_it_waits_for_the_numbers_that_it_asked_for(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[ScaleRequest] = []
    times: list[float] = []

    async def waited(found: Any, store: Any, request: ScaleRequest, timeout_s: float, watch: Any) -> None:
        requests.append(request)
        times.append(timeout_s)

    monkeypatch.setattr(scale_progress, "wait_carried_out", waited)
    assert typed("scale", "decode=+1").output.endswith("carried out\n")
    assert requests == [ScaleRequest(2, {Role.DECODE: 2})]
    assert typed("scale", "decode=2", "--timeout", "7").exit_code == 0
    assert typed("scale", "decode=2", "--timeout", "0").exit_code == 0
    assert times == [600.0, 7.0]


def test_hours_are_held_without_a_decision_and_released_as_any_hold(store: MemoryStore) -> None:
    answer = typed("scale", "decode=3", "--at", "00:00-24:00").output
    assert "decode is held at 3" in answer
    assert "always open\nThe planner goes there at its next decision, within 10 s of the hour." in answer
    assert asked_for(store) == "1"
    assert isinstance(typed("scale", "decode=5", "--no-wait").exception, ConfigError)
    over_budget = typed("scale", "decode=5", "--at", "00:00-24:00")
    assert "holding that takes 5 GPUs" in str(over_budget.exception)
    assert "released decode: it was held at 3" in typed("release", "decode").output


def test_hours_need_a_planner_that_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "connect", lambda _: deployment(None))
    refused = typed("scale", "decode=3", "--at", "09:00-17:00")
    assert "--at: no planner" in str(refused.exception)
