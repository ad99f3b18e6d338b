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
from dynaplan.cli.main import COMMANDS, LazyGroup, group
from dynaplan.util.errors import ConfigError, DeploymentError, DynaplanError


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
        "modules = {name: module.partition(':')[0] for name, (module, _) in COMMANDS.items()}\n"
        "print([name for name, module in modules.items() if f'dynaplan.cli.{module}' in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


DISAGG = ("serve", "graphs.disagg:Frontend", "-f", "disagg.yaml", "--dry-run")
AGG = ("serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--dry-run", "--gpus", "8")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("DYNAPLAN_NODE_DIR", "DYN_LOCAL_STATE_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "list.yaml").write_text("VllmWorker:\n  - engine: sim\n")
    (tmp_path / "tow.yaml").write_text("VlmWorker:\n  engine: sim\n")
    return tmp_path


def answer(*typed: str) -> str:
    """The message and its hint, as the user reads them."""
    result = CliRunner().invoke(group, typed)
    assert result.exit_code
    error = result.exception
    assert isinstance(error, DynaplanError | SystemExit), result
    return result.output + (
        f"{error}\n{getattr(error, 'hint', '')}" if isinstance(error, DynaplanError) else ""
    )


@pytest.mark.parametrize(
    ("number", "typed", "words"),
    [
        (1, ("serve", "graphs.disag:Frontend"), ["graphs.disag", "Did you mean 'graphs.disagg'?"]),
        (2, ("serve", "graphs.disagg:Fronted"), ["Fronted", "Did you mean 'Frontend'?"]),
        (3, (*DISAGG[:2], "-f", "disag.yaml"), ["no such file in", "Did you mean 'disagg.yaml'?"]),
        (7, (*DISAGG[:2], "--config", "f.yaml"), ["--config", "Did you mean", "'--config-file'"]),
        (8, (*AGG, "--VllmWorker.max-num-seq=3"), ["max-num-seq", "Did you mean 'max-num-seqs'?"]),
        (9, (*AGG[:2], "-f", "tow.yaml"), ["VlmWorker", "Did you mean 'VllmWorker'?"]),
        (10, (*AGG, "--VllmWorker.engine=vlm"), ["'vlm'", "Did you mean 'vllm'?", "llamacpp"]),
        (11, (*DISAGG, "--Planner.adjustment-interval=ten"), ["'ten'", "expected a number, more than 0"]),
        (13, (*AGG[:2], "-f", "list.yaml"), ["list.yaml", "Write sections such as"]),
        (17, (*AGG, "--Common.engine=vllm", "--Common.model=a/b"), ["pip install 'vllm'", "vllm-command"]),
        (22, (*AGG, "--VllmWorker.ServiceArgs.workers=9"), ["9 x 1", "8 visible", "Lower"]),
        (24, ("status", "--namespace", "tow"), ["no deployment tow"]),
        (25, ("status",), ["no deployment is running", "dynaplan serve", "DYN_LOCAL_STATE_DIR"]),
        (
            37,
            (*DISAGG, "--Planner.policy=sla"),
            ["profile", "`dynaplan profile-sla` measures one", "policy: load"],
        ),
        (41, ("simulate", "--trace", "sinusoid:", "--policy", "sal"), ["sal", "Did you mean 'sla'?"]),
        (41, ("simulate", "--trace", "sinus:"), ["sinus", "Did you mean 'sinusoid'?"]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_is_wrong_and_what_to_do_is_said(number: int, typed: tuple[str, ...], words: list[str]) -> None:
    text = answer(*typed)
    assert [word for word in words if word not in text] == [], text


def test_20_a_state_directory_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "file" / "state"))
    text = answer(*AGG[:4], "--port", "0")
    assert str(tmp_path / "file") in text
    assert "DYN_LOCAL_STATE_DIR" in text


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
