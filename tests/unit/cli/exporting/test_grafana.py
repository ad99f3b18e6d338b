"""``dynaplan export grafana`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaplan.cli import main
from dynaplan.cli.exporting.dashboard import dashboard


def export(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", "grafana", *arguments])
    return int(str(ended.value.code))


def test_a_dashboard_needs_no_deployment_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_METRICS_PREFIX", raising=False)
    assert export("-o", str(tmp_path / "dashboard.json")) == 0
    assert json.loads((tmp_path / "dashboard.json").read_text()) == dashboard("dynamo_frontend")
    assert capsys.readouterr().out == ""


def test_it_asks_for_the_names_that_the_frontends_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_METRICS_PREFIX", "mine")
    assert export() == 0
    assert json.loads(capsys.readouterr().out) == dashboard("mine")
