"""What a user meets who types the name of a command as other tools have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import FishComplete, ShellComplete, ZshComplete
from click.testing import CliRunner

from dynaplan import __version__
from dynaplan.cli.main import COMMAND_GROUPS, COMMANDS, LazyGroup, group
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


@pytest.mark.parametrize("command", ["status", "stop", "why", "bench", "reload"])
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


def test_the_help_page_has_the_commands_by_what_they_are_for() -> None:
    page = CliRunner().invoke(group, ["--help"]).output
    places = [page.index(f"\n{title}:\n") for title in COMMAND_GROUPS]
    assert places == sorted(places)
    assert page.index("\nRun:") < page.index("  serve ") < page.index("\nWatch:") < page.index("  why ")


def test_the_help_page_names_every_command_and_imports_none() -> None:
    script = (
        "import sys; from dynaplan.cli.main import COMMANDS, group\n"
        "page = group.get_help(group.make_context('dynaplan', [], resilient_parsing=True))\n"
        "assert all(name in page for name in COMMANDS), page\n"
        "modules = {name: module.partition(':')[0] for name, (module, _) in COMMANDS.items()}\n"
        "print([name for name, module in modules.items() if f'dynaplan.cli.{module}' in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


VARIABLE = "_DYNAPLAN_COMPLETE"


@pytest.mark.parametrize(
    ("words", "begun", "completed"),
    [
        ([], "rel", {"release", "reload"}),
        (["export"], "s", {"schema", "systemd"}),
        (["status"], "--w", {"--watch"}),
        (["serve", "graphs.agg:Frontend", "--log-format"], "j", {"json"}),
    ],
)
def test_what_is_begun_is_completed(words: list[str], begun: str, completed: set[str]) -> None:
    completion = ShellComplete(group, {}, "dynaplan", VARIABLE)
    assert {each.value for each in completion.get_completions(words, begun)} == completed


@pytest.mark.parametrize(("shell", "call"), [(ZshComplete, "compdef"), (FishComplete, "complete ")])
def test_the_lines_of_the_guide_get_a_shells_own_words(shell: type[ShellComplete], call: str) -> None:
    source = shell(group, {}, "dynaplan", VARIABLE).source()
    assert VARIABLE in source
    assert call in source


@click.command(
    cls=LazyGroup,
    table={"pull": ("pull", "Fetch."), "gone": ("nowhere", "Not imported.")},
    habits={"fetch": "pull"},
)
def lazy() -> None:
    """Some commands."""


def test_the_help_page_is_in_the_tables_order_and_imports_nothing() -> None:
    result = CliRunner().invoke(lazy, ["--help"])
    assert result.output.index("pull  Fetch.") < result.output.index("gone  Not imported.")


def test_a_word_of_other_tools_is_answered_with_the_command_and_others_with_the_nearest() -> None:
    assert "No such command 'FETCH'. Did you mean 'pull'?" in CliRunner().invoke(lazy, ["FETCH"]).output
    assert "No such command 'pul'. Did you mean 'pull'?" in CliRunner().invoke(lazy, ["pul"]).output


def test_a_command_is_imported_when_it_is_used() -> None:
    assert "Usage: lazy pull" in CliRunner().invoke(lazy, ["pull", "--help"]).output


def test_a_working_directory_that_was_removed_is_named_and_no_traceback(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -P -m dynaplan serve x.gguf --dry-run"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "working directory of this process is no longer there" in result.stderr
    assert "Traceback" not in result.stderr
