"""``dynaplan report``: one file, without secrets."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli import doctor, report
from dynaplan.fleet import deployments
from dynaplan.util.errors import ConfigError, DeploymentError


@pytest.fixture(autouse=True)
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A box of which nothing is looked at."""
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path / "logs"))


def found(tmp_path: Path) -> Any:
    log_dir = tmp_path / "logs" / "ns"
    log_dir.mkdir(parents=True)
    (log_dir / "ns_VllmWorker.log").write_text("first\nit has tok-12345 inside\npassword=hunter2\n")
    return SimpleNamespace(
        namespace="ns",
        log_dir=log_dir,
        document={"namespace": "ns", "environment": {"HF_TOKEN": "hf-1", "URL": "http://me:pw@host/x"}},
        environment=lambda: {"DYNAPLAN_WORKER_TOKEN": "tok-12345"},
        workers=(),
    )


def run(*arguments: str) -> Any:
    return CliRunner().invoke(report.command, arguments, standalone_mode=False)


def test_a_report_has_state_and_logs_and_no_secret_and_is_for_its_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found(tmp_path))
    path = tmp_path / "report.txt"
    result = run("-o", str(path), "-n", "2")
    assert result.exception is None, result.exception
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for title in (
        "the box",
        "packages",
        "environment",
        "state",
        "statefile",
        "decisions",
        "the last 2 lines",
    ):
        assert f"\n== {title}" in text
    assert "it has *** inside" in text
    assert "first" not in text
    assert not any(secret in text for secret in ("tok-12345", "hunter2", "hf-1", "me:pw"))
    assert "aiohttp " in text


def test_a_part_that_cannot_be_had_keeps_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found(tmp_path))
    monkeypatch.setattr(report, "_packages", lambda: 1 / 0)
    path = tmp_path / "report.txt"
    run("-o", str(path))
    assert "(cannot be had: ZeroDivisionError: division by zero)" in path.read_text()
    assert "== statefile ==" in path.read_text()


def test_without_a_deployment_the_logs_of_the_last_one_are_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(namespace: str | None) -> Any:
        raise DeploymentError("no deployment is running here")

    found(tmp_path)
    monkeypatch.setattr(deployments, "find_deployment", none)
    path = tmp_path / "report.txt"
    run("--namespace", "ns", "-o", str(path))
    assert "no deployment is running here" in path.read_text()
    assert "first" in path.read_text()


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found(tmp_path))
    error = run("-o", str(tmp_path / "none" / "x")).exception
    assert isinstance(error, ConfigError)


def test_the_home_directory_is_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert report.masked("in /home/somebody/.dynamo", []) == "in ~/.dynamo"
