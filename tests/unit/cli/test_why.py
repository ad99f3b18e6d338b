"""Whose decisions are explained, and the lines about workers that were removed."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli import why as command
from dynaplan.cli.why import no_decisions, removal_line
from dynaplan.contract.model_keys import MODEL_EVENTS, ModelEvent
from dynaplan.fleet.rules.reconcile import REMOVALS, Removal
from dynaplan.planner.recorders.manual_changes import ManualChange, record_manual_change
from dynaplan.util.durations import local_time


def test_a_planned_model_without_a_decision_is_named_with_when_there_will_be_one(tmp_path: Path) -> None:
    found: Any = SimpleNamespace(log_dir=tmp_path, began_s=0.0)
    assert no_decisions(found, "decision", "b/2", "b-2") == (
        "No decision about b/2 yet. Its planner decides every adjustment-interval while it is loaded."
    )


def test_each_removal_is_printed_with_its_time_and_its_reason() -> None:
    at = datetime(2026, 5, 4, 3, 2, 1)
    why = "2 of 3 VllmWorker wanted"
    removed = removal_line(Removal("ns_VllmWorker_2", at.timestamp(), why))
    assert removed == f"2026-05-04 03:02:01  ns_VllmWorker_2 was removed: {why}"


def test_planner_persons_models_and_removals_are_one_story_by_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: Any = SimpleNamespace(namespace="ns", log_dir=tmp_path, began_s=0.0, document={"environment": {}})
    record_manual_change(tmp_path, ManualChange(200.0, "alice", "decode 4 -> 2"))
    fleet = {
        MODEL_EVENTS: [
            asdict(ModelEvent(290.0, "bee", "unload: makes room for ant")),
            asdict(ModelEvent(300.0, "ant", "load: asked for")),
        ],
        REMOVALS: [
            Removal("ns_VllmWorker_3", 250.0, "2 of 4 wanted").to_json(),
            Removal("ns_bee", 290.0, "makes room for ant").to_json(),
        ],
    }

    async def published(namespace: str) -> dict[str, Any]:
        return fleet

    monkeypatch.setattr(command, "connect", lambda namespace: found)
    monkeypatch.setattr(command, "published", published)
    monkeypatch.setattr(command, "_decided", lambda *_, changes: ([(100.0, "decided\n")], ["No change yet."]))
    printed = CliRunner().invoke(command.command, ["--changes"], catch_exceptions=False).output
    assert [line for line in printed.splitlines() if line] == [
        "decided",
        f"{local_time(200.0)}  by hand (alice): decode 4 -> 2",
        f"{local_time(250.0)}  ns_VllmWorker_3 was removed: 2 of 4 wanted",
        f"{local_time(290.0)}  model bee: unload: makes room for ant",
        f"{local_time(300.0)}  model ant: load: asked for",
        "No change yet.",
    ]
