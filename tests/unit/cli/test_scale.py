"""``dynaplan scale``: what it asks for before, and what it says afterwards."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli import scale
from dynaplan.cli.main import group
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.lifecycle import Role, Worker
from dynaplan.options.service_config import CONFIG_VARIABLE


def deployment(planner: dict[str, Any] | None) -> Any:
    """A deployment with one decode worker, and a planner with these options."""
    workers = [Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, since_s=0.0)]
    if planner is not None:
        workers.append(Worker("ns_Planner", "Planner", Role.PLANNER, since_s=0.0))
    return SimpleNamespace(
        namespace="ns",
        workers=workers,
        document={
            "components": {"ns_VllmWorker": {"component": "VllmWorker", "role": "decode"}},
            "environment": {CONFIG_VARIABLE: json.dumps({"Planner": planner or {}})},
        },
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be written for a deployment that is planned every 10 s."""
    calls: list[tuple[Any, ...]] = []

    async def write(*arguments: Any) -> None:
        calls.append(arguments)

    monkeypatch.setattr(scale, "connect", lambda _: deployment({"adjustment-interval": 10}))
    monkeypatch.setattr(scale, "_scale", write)
    return calls


@pytest.mark.parametrize("role", ["decode", "VllmWorker"])
def test_the_last_worker_that_answers_goes_only_with_yes(asked: list[tuple[Any, ...]], role: str) -> None:
    refused = CliRunner().invoke(group, ["scale", f"{role}=0"])
    assert isinstance(refused.exception, ConfigError)
    assert "--yes" in str(refused.exception)
    assert asked == []
    assert CliRunner().invoke(group, ["scale", f"{role}=0", "--yes"]).exit_code == 0
    assert asked[0][1] == {Role.DECODE: 0}


def test_the_answer_says_when_the_planner_may_change_it_and_how_to_keep_it(
    asked: list[tuple[Any, ...]],
) -> None:
    assert CliRunner().invoke(group, ["scale", "decode=2"]).exit_code == 0
    note = asked[0][-1]
    assert "every 10 s" in note
    assert "--Planner.no-operation=true" in note


@pytest.mark.parametrize("planner", [None, {"no-operation": True}, {"no_operation": True}])
def test_without_a_planner_that_scales_there_is_nothing_to_say(planner: dict[str, Any] | None) -> None:
    assert scale._planners_part(deployment(planner)) == ""
