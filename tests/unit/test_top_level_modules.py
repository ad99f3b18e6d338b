"""The modules at the top of the package: stock graphs with and without a planner, and the fleet plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.fleet_plugin import FleetPlugin
from dynaplan.graph.loading import load_graph
from dynaplan.planner.recorders.decision_log import write_pointer


@pytest.mark.parametrize(("module", "has_planner"), [("components", False), ("planned_components", True)])
def test_the_stock_services_are_linked_and_those_of_planned_models_with_a_planner(
    tmp_path: Path, module: str, has_planner: bool
) -> None:
    services = [each.name for each in load_graph(f"dynaplan.{module}:Frontend", tmp_path).services()]
    assert {"Frontend", "Processor", "VllmWorker", "PrefillWorker"} <= set(services)
    assert ("Planner" in services) is has_planner


def record(second: int, budget: float) -> dict[str, Any]:
    state = {"error_budget": {"ttft_requests": budget, "itl_requests": 1.0}}
    wall_time = f"2026-05-04T03:02:{second:02}+00:00"
    return {"wall_time": wall_time, "settings": {}, "decision": {}, "state": state, "next_state": state}


def test_the_fleet_plugins_events_are_those_of_the_decisions_below_the_deployments_logs(
    tmp_path: Path,
) -> None:
    log = tmp_path / "run" / "decisions.jsonl"
    log.parent.mkdir()
    write_pointer(tmp_path, log.parent)
    log.write_text(json.dumps(record(1, 5.0)) + "\n")
    events = FleetPlugin.decision_events(None, tmp_path)  # type: ignore[arg-type]  # of itself it needs nothing
    assert list(events.poll()) == []
    missed = record(2, 5.0)
    missed["next_state"] = record(2, -4.0)["state"]
    log.write_text(f"{log.read_text()}{json.dumps(missed)}\n")
    assert [each.kind for each in events.poll()] == ["target_missed"]
