"""What a user meets who types the name of a command as other tools have it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from dynaplan import __version__
from dynaplan.cli.main import COMMANDS, group
from dynaplan.util.errors import ConfigError, DeploymentError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("serv", "serve"),
        ("stauts", "status"),
        ("ps", "status"),
        ("run", "serve"),
        ("down", "stop"),
        ("explain", "why"),
    ],
)
def test_an_unknown_command_is_answered_with_the_one_that_is_meant(typed: str, meant: str) -> None:
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in run(typed)


def test_a_command_like_no_other_is_answered_with_all() -> None:
    assert f"Known: {', '.join(sorted(COMMANDS))}" in run("xyzzy")


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "dynaplan", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert __version__ in result.stdout


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize("named", [["mine"], ["--namespace", "mine"], ["mine", "--namespace", "mine"]])
def test_a_deployment_is_named_by_an_argument_or_by_the_option(
    command: str, named: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    result = CliRunner().invoke(group, [command, *named])
    assert isinstance(result.exception, DeploymentError)
    assert "no deployment mine" in str(result.exception)


def test_an_argument_wins_over_the_variable_but_not_over_another_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_NAMESPACE", "other")
    assert "no deployment mine" in str(CliRunner().invoke(group, ["stop", "mine"]).exception)
    both = CliRunner().invoke(group, ["stop", "mine", "--namespace", "another"])
    assert isinstance(both.exception, ConfigError)


def test_the_help_page_names_every_command_and_imports_none() -> None:
    script = (
        "import sys; from dynaplan.cli.main import COMMANDS, group\n"
        "page = group.get_help(group.make_context('dynaplan', [], resilient_parsing=True))\n"
        "assert all(name in page for name in COMMANDS), page\n"
        "print([name for name, (module, _) in COMMANDS.items() if f'dynaplan.cli.{module}' in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"
