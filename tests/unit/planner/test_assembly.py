"""The planner as a service: it starts without blocking, and leaves word where it logs.

What a planner that starts remembers of the one before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.stock import PLANNER
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.option_changes import OptionChange
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import KubernetesClient
from dynaplan.planner.assembly import (
    AssembledPlanner,
    make_planner,
    planner_log_root,
    restore_evidence,
    restore_state,
    run_planner,
    start_planner,
)
from dynaplan.planner.deployment import DeploymentValidationError
from dynaplan.planner.model import DecisionRecord, ErrorBudget, PlannerState, WorkerLimits
from dynaplan.planner.option_memory import BarredValue, OptionMemory, ServedPart
from dynaplan.planner.recorders.decision_log import recent_records
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.service import Planner
from dynaplan.store import connections
from dynaplan.store.discovery import Discovery
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError
from tests.fakes.clock import LoopClock
from tests.fakes.kube_api import KubeApi
from tests.fakes.pod_controller import PodController
from tests.fakes.polling import eventually
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS, planned_interval


async def no_messenger() -> Any:
    raise AssertionError("nobody may connect before there is a prefill worker")


class Runtime(SimpleNamespace):
    """What a service is given, as ``dynaplan.worker.worker_runtime.WorkerRuntime`` gives it."""

    def __init__(self, **settings: object) -> None:
        clock = SystemClock()
        store = MemoryStore(clock)
        super().__init__(
            namespace="ns",
            worker_name="ns_Planner",
            settings=settings,
            store=store,
            clock=clock,
            discovery=Discovery(store, "ns"),
            messenger=no_messenger,
            tasks=[],
            closers=[],
            readers=[],
        )

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(coroutine, name=name))

    def add_metrics(self, read: Any) -> None:
        self.readers.append(read)

    def on_stop(self, close: Any) -> None:
        self.closers.append(close)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for close in self.closers:
            await close()


@pytest.fixture(autouse=True)
def log_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAPLAN_LOG_DIR", str(tmp_path))
    return tmp_path


async def test_it_plans_beside_the_service_and_says_where_it_logs(log_dir):
    runtime = Runtime(**{"backend": "vllm", "log-dir": str(log_dir / "mine")})
    await start_planner(runtime)
    await asyncio.sleep(0)
    assert [task.done() for task in runtime.tasks] == [False]
    assert (log_dir / "planner" / "current").read_text() == f"{log_dir / 'mine'}\n"
    assert recent_records(planner_log_root(), 3) == []
    await runtime.end()


class SilentStore(MemoryStore):
    """A store whose server never answers a watch."""

    async def watch(self, prefix: str):
        await asyncio.Event().wait()
        yield


@pytest.mark.looptime
async def test_without_a_store_it_says_at_once_and_every_30_s_what_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(connections, "connect_store", lambda: SilentStore(LoopClock()))
    with caplog.at_level(logging.INFO), pytest.raises(TimeoutError):
        async with asyncio.timeout(62):
            await run_planner(PlannerSettings())
    waiting = "waiting for the key-value store to answer"
    assert [record.getMessage() for record in caplog.records] == [waiting] * 3


async def test_a_wrong_option_ends_the_start():
    with pytest.raises(ConfigError, match="max-gpu-budget"):
        await start_planner(Runtime(**{"max-gpu-bugdet": 4}))


async def test_a_log_directory_that_cannot_be_written_does_not_keep_it_from_planning(log_dir, caplog):
    (log_dir / "planner").touch()
    runtime = Runtime()
    planner = make_planner(PlannerSettings(), runtime.store, runtime.discovery, no_messenger, runtime.clock)
    await planner.close()
    assert "may not find these decisions" in caplog.text


def test_the_service_is_a_planner_and_knows_every_option():
    assert Planner.role is Role.PLANNER
    assert set(PlannerSettings().to_options()) <= set(PLANNER)


@pytest.mark.parametrize("options", [{"policy": "load"}, {"policy": "sla"}])
async def test_a_planner_on_a_cluster_needs_a_store_or_a_prometheus(options, monkeypatch):
    for name in ("ETCD_ENDPOINTS", "DYN_DISCOVERY_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    settings = PlannerSettings.from_options({**options, "environment": "kubernetes"})
    with pytest.raises(ConfigError, match="prometheus-endpoint"):
        await run_planner(settings)


async def test_a_planner_checks_the_cluster_that_it_is_to_scale_before_it_plans(monkeypatch, tmp_path):
    """The deployment is there, and its models do not agree."""
    api = KubeApi()
    cluster = PodController(api)
    cluster.add_deployment("prefill", 1, model="one")
    cluster.add_deployment("decode", 1, model="another")
    api.is_available = False
    monkeypatch.setattr(KubernetesClient, "from_environment", lambda environ: api.client())
    monkeypatch.setenv("ETCD_ENDPOINTS", "")
    settings = PlannerSettings.from_options(
        {
            "policy": "sla",
            "environment": "kubernetes",
            "prometheus-endpoint": "http://127.0.0.1:1",
            "log-dir": str(tmp_path),
            "profile-results-dir": "mocker",
        }
    )
    planning = asyncio.ensure_future(run_planner(settings))
    await asyncio.sleep(0.05)
    assert not planning.done(), "an API server that is away is waited for"
    api.is_available = True
    with pytest.raises(DeploymentValidationError, match="prefill workers serve 'one'"):
        await planning


class Closing:
    """A part of a planner that notes its close, and then fails or waits for ever, if told so."""

    def __init__(self, name: str, closed: list[str], fault: str = "") -> None:
        self._name, self._closed, self._fault = name, closed, fault

    async def close(self) -> None:
        self._closed.append(self._name)
        if self._fault == "waits":
            await asyncio.Event().wait()
        if self._fault:
            raise OSError(self._fault)


class ClosingRecorder(Closing):
    def close(self) -> None:  # type: ignore[override]  # recorders do not wait
        self._closed.append(self._name)


def planner_of_parts(closed: list[str], *faults: str) -> AssembledPlanner:
    cluster, observer, traffic, backtester = (
        Closing(name, closed, fault)
        for name, fault in zip(("cluster", "observer", "traffic", "backtester"), faults, strict=True)
    )
    parts: Any = (None, None, observer, [ClosingRecorder("recorder", closed)], dict, traffic, backtester)
    return AssembledPlanner(*parts, cluster.close)


PARTS = ["backtester", "cluster", "observer", "traffic"]


async def test_a_part_that_cannot_be_closed_is_logged_and_the_others_are_closed(caplog):
    closed: list[str] = []
    await planner_of_parts(closed, "no cluster", "no worker", "", "").close()
    assert (sorted(closed[:-1]), closed[-1]) == (PARTS, "recorder")
    assert "no cluster" in caplog.text and "no worker" in caplog.text


async def test_a_close_that_is_cancelled_has_begun_to_close_every_part():
    closed: list[str] = []
    closing = asyncio.ensure_future(planner_of_parts(closed, "waits", "", "", "").close())
    await eventually(lambda: closed)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (sorted(closed[:-1]), closed[-1]) == (PARTS, "recorder")


AT = datetime.fromisoformat("2026-01-01T12:00:00+00:00")
AT_S = interval(1, 1).at_s
KNOWN = PlannerState(
    decode_grace_left=2,
    error_budget=ErrorBudget(-40.0, 30.0),
)


def record(settings: PlannerSettings = SETTINGS) -> dict[str, Any]:
    seen = replace(interval(1, 1), unknown="nothing")
    _, decision = decide(settings, PlannerState(), seen)
    return DecisionRecord(AT.isoformat(), settings, PlannerState(), seen, decision, KNOWN).to_json()


def test_the_error_budget_goes_on_and_has_faded_by_the_time_between():
    state = restore_state([record()], SETTINGS, AT + timedelta(hours=1), AT_S + 3600)
    assert state.error_budget.ttft_requests == pytest.approx(-40 * 0.3679, rel=1e-3)
    assert state.error_budget.itl_requests == pytest.approx(30 * 0.3679, rel=1e-3)


def test_grace_and_corrections_begin_anew():
    state = restore_state([record()], SETTINGS, AT, AT_S)
    assert state.decode_grace_left == 0
    assert state.corrections == PlannerState().corrections


def test_what_is_remembered_of_the_engines_options_goes_on():
    change = OptionChange("VllmWorker", "max-num-seqs", 8, 16, 1.0)
    options = OptionMemory(change, recent_parts=(ServedPart(60.0, 9.0, 1.0, 900.0),))
    document = {**record(), "next_state": replace(KNOWN, options=options).to_json()}
    assert restore_state([document], SETTINGS, AT, AT_S).options == options


def test_without_a_window_the_engines_options_are_remembered_all_the_same():
    settings, options = replace(SETTINGS, slo_window_s=0.0), OptionMemory(applied_at_s=1.0)
    document = {**record(settings), "next_state": replace(KNOWN, options=options).to_json()}
    assert restore_state([document], settings, AT, AT_S) == PlannerState(options=options)


def test_a_value_is_barred_for_as_long_where_the_machine_was_started_again():
    options = OptionMemory(barred=(BarredValue("VllmWorker", "max-num-seqs", 16, AT_S + 900.0),))
    document = {**record(), "next_state": replace(KNOWN, options=options).to_json()}
    state = restore_state([document], SETTINGS, AT + timedelta(seconds=600), 40.0)
    assert state.options.barred[0].until_s == 40.0 + 300.0


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (replace(SETTINGS, ttft_ms=300.0), AT),
        (replace(SETTINGS, namespace="other"), AT),
        (PlannerSettings(), AT),
        (SETTINGS, AT - timedelta(seconds=1)),
    ],
    ids=["another promise", "another namespace", "no promise", "the future"],
)
def test_nothing_is_remembered_of(before, now):
    assert restore_state([record(before)], SETTINGS, now, AT_S) == PlannerState()


@pytest.mark.parametrize("documents", [[], [{"some": "thing"}], [{**record(), "wall_time": "soon"}]])
def test_what_cannot_be_read_is_as_no_record(documents):
    assert restore_state(documents, SETTINGS, AT, AT_S) == PlannerState()


def test_without_a_window_there_is_no_budget():
    settings = replace(SETTINGS, slo_window_s=0.0)
    assert restore_state([record(settings)], settings, AT, AT_S) == PlannerState()


def seen_traffic(minutes_ago: float, settings: PlannerSettings = SETTINGS) -> dict[str, Any]:
    at = AT - timedelta(minutes=minutes_ago)
    seen = planned_interval(1, 1, [10.0])
    _, decision = decide(replace(settings, policy="load"), PlannerState(), seen)
    return DecisionRecord(at.isoformat(), settings, PlannerState(), seen, decision, KNOWN).to_json()


def asks_after(documents: list[dict[str, Any]]) -> bool:
    """Whether a planner that starts has evidence enough for a backtest in its first interval."""
    schedule = restore_evidence(documents, SETTINGS, AT)
    return (
        schedule.question(planned_interval(1, 1, [10.0]), KNOWN, WorkerLimits(), PoolSizes(1, 1)) is not None
    )


def test_a_restart_goes_on_with_the_traffic_of_the_last_window():
    assert asks_after([seen_traffic(minutes / 6) for minutes in range(60)])


def test_traffic_of_engines_with_other_steps_is_no_evidence_of_what_these_keep():
    other = replace(SETTINGS, decode_max_num_seqs=8)
    assert not asks_after([seen_traffic(minutes / 6, other) for minutes in range(60)])


def test_older_traffic_that_of_another_deployment_and_what_cannot_be_read_is_no_evidence():
    assert not asks_after([seen_traffic(61 + minutes / 6) for minutes in range(60)])
    other = replace(SETTINGS, namespace="other")
    assert not asks_after([seen_traffic(minutes / 6, other) for minutes in range(60)])
    assert not asks_after([{"some": "thing"}] * 60)
