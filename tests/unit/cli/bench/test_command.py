"""``dynaplan bench`` as a user types it."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli.bench import command
from dynaplan.fleet import deployments
from dynaplan.util.errors import ConfigError, DeploymentError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command.command, arguments, standalone_mode=False)


def test_clients_and_a_trace_are_two_loads() -> None:
    error = run("--clients", "2", "--trace", "poisson").exception
    assert isinstance(error, ConfigError)
    assert "two loads" in str(error)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("90", 90), ("1h30m", 5400)])
def test_a_duration_is_written_as_people_write_it(text: str, seconds: int) -> None:
    context = click.Context(command.command)
    assert command.duration_s(context, command.command.params[0], text) == seconds


def test_a_duration_of_nothing_is_refused() -> None:
    assert "is no duration" in str(run("--for", "0s").exception)


def test_a_trace_that_cannot_be_read_is_named_before_anything_is_sent() -> None:
    assert "no load is called" in str(run("--trace", "sinus").exception)


def test_without_a_deployment_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(namespace: str | None) -> Any:
        raise DeploymentError("no deployment is running here")

    monkeypatch.setattr(deployments, "find_deployment", none)
    assert "no deployment" in str(run().exception)


def test_a_service_that_does_not_answer_is_named() -> None:
    error = run("--url", "http://127.0.0.1:9/v1/", "--for", "1s").exception
    assert isinstance(error, DeploymentError)
    assert "http://127.0.0.1:9 does not answer" in str(error)
