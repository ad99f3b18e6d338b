"""``dynaplan pull``: the list, a name that is none, and what follows a pull."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli import pull
from dynaplan.cli.main import group
from dynaplan.util.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_without_a_name_the_models_are_listed_with_size_and_licence() -> None:
    result = CliRunner().invoke(group, ["pull"])
    assert result.exit_code == 0
    assert result.output.splitlines()[1].split()[:5] == ["smollm2", "98", "MB", "Apache-2.0", "no"]


def test_a_misspelt_model_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(group, ["pull", "smolm2"])
    assert isinstance(result.exception, ConfigError)
    assert "Did you mean 'smollm2'?" in str(result.exception)


def test_a_pull_tells_licence_path_and_the_command_that_serves_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pull, "pull", lambda model, _: tmp_path / model.name)
    result = CliRunner().invoke(group, ["pull", "smollm2"])
    assert result.exit_code == 0
    assert "Apache-2.0" in result.output
    assert str(tmp_path / "smollm2") in result.output
    assert result.output.endswith("dynaplan serve smollm2\n")
