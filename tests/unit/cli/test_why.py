"""Whose decisions are explained, and the lines about workers that were removed."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynaplan.cli.why import no_decisions, removal_lines
from dynaplan.fleet.rules.reconcile import Removal


def test_a_planned_model_without_a_decision_is_named_with_when_there_will_be_one(tmp_path: Path) -> None:
    found: Any = SimpleNamespace(log_dir=tmp_path, began_s=0.0)
    assert no_decisions(found, "decision", "b/2", "b-2") == (
        "No decision about b/2 yet. Its planner decides every adjustment-interval while it is loaded."
    )


def test_each_removal_is_printed_with_its_time_and_its_reason() -> None:
    at = datetime(2026, 5, 4, 3, 2, 1)
    why = "2 of 3 VllmWorker wanted"
    assert removal_lines([Removal("ns_VllmWorker_2", at.timestamp(), why)]) == [
        f"2026-05-04 03:02:01  ns_VllmWorker_2 was removed: {why}"
    ]
