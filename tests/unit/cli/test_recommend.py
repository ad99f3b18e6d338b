"""What ``dynaplan recommend`` says, from the planner's last decision."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli import recommend as command
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import (
    BacktestResult,
    Decision,
    DecisionRecord,
    Observation,
    OptionTrial,
    PlannerState,
)

TRIAL = OptionTrial("VllmWorker", "max-num-seqs", 8, 16, 0.672, 0.998, is_certain=True)
ANSWER = BacktestResult(PoolSizes(0, 1), requests=900, window_s=900.0, best_trial=TRIAL)


def printed(
    monkeypatch: pytest.MonkeyPatch,
    answer: BacktestResult | None,
    options: dict[str, Any] | None = None,
    services: tuple[str, ...] = ("VllmWorker",),
) -> str:
    """The command's output, where that is the last decision's backtest and these are the worker's options."""
    settings = PlannerSettings(policy="sla" if answer else "load")
    observation, one = Observation(1.0, backtest=answer), PoolSizes(0, 1)
    record = DecisionRecord(
        "2026-05-04T03:02:01+00:00", settings, PlannerState(), observation, Decision(one, one)
    )
    launch = SimpleNamespace(
        graph=SimpleNamespace(services=[SimpleNamespace(name=name) for name in services]),
        settings_of=lambda component: options or {},
    )
    found = SimpleNamespace(namespace="ns", runtime_dir=None)
    monkeypatch.setattr(command, "connect", lambda namespace: found)
    monkeypatch.setattr(command, "planner_components", lambda found: {"": ""})
    monkeypatch.setattr(command, "decisions_of", lambda found, last, component: [record.to_json()])
    monkeypatch.setattr(command, "read_launch", lambda runtime_dir: launch)
    return CliRunner().invoke(command.command, [], catch_exceptions=False).output


def test_a_gain_is_said_with_the_command_that_sets_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, ANSWER).splitlines() == [
        "VllmWorker.max-num-seqs 8 -> 16 would have kept 99.8% of the last 15 min, 67.2% as it is",
        "  dynaplan reload ns --VllmWorker.max-num-seqs=16",
    ]


def test_the_option_has_the_name_that_the_worker_is_configured_by(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"engine": "llamacpp", "parallel": 8}
    assert "--VllmWorker.parallel=16" in printed(monkeypatch, ANSWER, options)


def test_the_workers_of_a_model_on_request_are_not_reloaded_by_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "reload" not in printed(monkeypatch, ANSWER, services=("Frontend",))


def test_without_a_sure_gain_there_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    unsure = replace(ANSWER, best_trial=replace(TRIAL, is_certain=False))
    assert "reload" not in printed(monkeypatch, unsure)


def test_why_nothing_was_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    early = BacktestResult(missing="590 s of traffic are known, and a backtest needs 600")
    assert printed(monkeypatch, early) == f"nothing is tried yet: {early.missing}\n"
    assert "plans for no targets" in printed(monkeypatch, None)
