from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli.compat import ORIGINAL_COMMANDS, run_original
from dynaplan.cli.main import group
from dynaplan.config.settings.servers import COMPAT_VARIABLE
from dynaplan.graph.loading import COMPAT_DIR
from dynaplan.util.errors import ConfigError


def test_the_command_runs_as_it_is_with_the_modules_on_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: run.append(arguments))
    result = CliRunner().invoke(group, ["compat", "python", "-u", "ask.py", "--help"])
    assert result.exit_code == 0, result.output
    ((program, words, environment),) = run
    assert (program, words) == ("python", ("python", "-u", "ask.py", "--help"))
    assert environment[COMPAT_VARIABLE] == "dynamo"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(COMPAT_DIR)


def test_a_program_that_there_is_not_is_named() -> None:
    result = CliRunner().invoke(group, ["compat", "no-such-program"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot run no-such-program: No such file" in str(result.exception)


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (
            "dynamo.frontend",
            ["--router-mode", "kv", "--no-kv-events", "--http-port=8001", "--http-host", "0.0.0.0"],
            ["frontend", "--router-mode", "kv", "--no-kv-events", "--port=8001", "--host", "0.0.0.0"],
        ),
        ("dynamo.frontend", ["--router-mod", "kv"], ["frontend", "--router-mod", "kv"]),
        (
            "dynamo.vllm",
            ["--model", "a/b", "--is-prefill-worker"],
            ["worker", "--engine", "vllm", "--model", "a/b", "--role", "prefill"],
        ),
    ],
)
def test_a_module_of_the_original_is_a_command_of_ours(
    module: str, arguments: list[str], words: list[str]
) -> None:
    assert ORIGINAL_COMMANDS[module].words(arguments) == words


def test_a_flag_without_counterpart_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "--endpoint=dyn://a.b.c"])
    with pytest.raises(SystemExit) as raised:
        run_original("dynamo.vllm")
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("Error: --endpoint of the original has no counterpart here")
