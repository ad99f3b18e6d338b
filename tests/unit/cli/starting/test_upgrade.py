"""What an upgrade looks at before it touches anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.starting.upgrade import check_configuration, command
from dynaplan.util.errors import ConfigError, DeploymentError, GraphError
from tests.unit.fleet.test_launch import LAUNCH

REPOSITORY = str(Path(__file__).parents[4])
OF_AGG = replace(
    LAUNCH, graph=replace(LAUNCH.graph, identifier="graphs.agg:Frontend", working_dir=REPOSITORY)
)


def test_a_statefile_of_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "dynamo.json").write_text(json.dumps({"version": 2}))
    result = CliRunner().invoke(command)
    assert isinstance(result.exception, DeploymentError)
    assert "dynamo.json is of format 2, and this dynaplan reads formats up to 1" in str(result.exception)


def test_settings_that_this_version_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    check_configuration(replace(OF_AGG, config={"Frontend": {"router": "kv"}}))
    assert Path.cwd() == Path("/")
    with pytest.raises(ConfigError, match="routr"):
        check_configuration(replace(OF_AGG, config={"Frontend": {"routr": "kv"}}))
    assert Path.cwd() == Path("/")


def test_a_graph_that_this_environment_cannot_import_is_refused() -> None:
    graph = replace(OF_AGG.graph, identifier="graphs.nowhere:Frontend")
    with pytest.raises(GraphError):
        check_configuration(replace(OF_AGG, graph=graph))
