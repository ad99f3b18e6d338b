from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.config.settings.servers import COMPAT_VARIABLE
from dynaplan.graph.loading import COMPAT_DIR
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize("words", [["python", "-u", "ask.py"], ["python3", "-u", "ask.py"], ["ask.py"]])
def test_a_python_program_runs_by_the_interpreter_that_has_dynaplan(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: run.append(arguments))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ask.py").touch()
    assert CliRunner().invoke(group, ["compat", *words]).exit_code == 0
    ((program, given, _),) = run
    assert program == given[0] == sys.executable
    assert given[-1] == "ask.py"


def test_the_command_runs_as_it_is_with_the_modules_on_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: run.append(arguments))
    result = CliRunner().invoke(group, ["compat", "uv", "run", "ask.py", "--help"])
    assert result.exit_code == 0, result.output
    ((program, words, environment),) = run
    assert (program, words) == ("uv", ["uv", "run", "ask.py", "--help"])
    assert environment[COMPAT_VARIABLE] == "dynamo"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(COMPAT_DIR)


def test_a_program_that_there_is_not_is_named() -> None:
    result = CliRunner().invoke(group, ["compat", "no-such-program"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot run no-such-program: No such file" in str(result.exception)
