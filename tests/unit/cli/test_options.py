"""Options that several commands have: they go into the environment of all processes."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli.options import tls_options
from dynaplan.config.settings.servers import TLS_VARIABLES


@click.command()
@tls_options
def command() -> None:
    click.echo(" ".join(os.environ.get(name, "-") for name in TLS_VARIABLES.values()))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in TLS_VARIABLES.values():
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_files_are_handed_on_by_their_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAPLAN_TLS_CA", "ca.pem")
    result = CliRunner().invoke(command, ["--tls-cert", "c.pem", "--tls-key", "/keys/c.key"])
    assert result.output.split() == [str(tmp_path / "c.pem"), "/keys/c.key", str(tmp_path / "ca.pem")]


def test_without_them_nothing_is_set() -> None:
    assert CliRunner().invoke(command, []).output.split() == ["-", "-", "-"]


def test_the_help_says_what_they_are_for() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    assert "--tls-cert FILE" in text
    assert "the system's" in text
