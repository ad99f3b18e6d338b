"""``dynaplan export``: a group of targets, each imported on use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dynaplan.cli import main
from dynaplan.cli.export import SHORT, TARGETS, schema
from dynaplan.cli.main import group
from dynaplan.config.schema import config_schema
from dynaplan.kubernetes.templates import documents


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_is_a_command(target: str) -> None:
    result = CliRunner().invoke(group, ["export", target, "--help"])
    assert result.exit_code == 0
    assert f"export {target}" in result.output


def test_a_misspelt_target_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(group, ["export", "graphana"])
    assert result.exit_code == 2
    assert "No such command 'graphana'. Did you mean 'grafana'?" in result.output


@pytest.mark.parametrize(("word", "target"), SHORT.items())
def test_a_short_word_is_answered_with_the_target(word: str, target: str) -> None:
    result = CliRunner().invoke(group, ["export", word])
    assert result.exit_code == 2
    assert f"Did you mean {target!r}?" in result.output


def test_the_help_page_imports_nothing_that_takes_time() -> None:
    script = (
        "import sys; from dynaplan.cli.main import main\n"
        "try: main(['export', '--help'])\n"
        "except SystemExit: print([name for name in ('yaml', 'asyncio', 'aiohttp') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "prometheus" in result.stdout
    assert result.stdout.endswith("[]\n")


def test_the_definition_of_the_workers_own_objects_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "crd"])
    assert ended.value.code == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == documents("crd.yaml", {})


def test_the_schema_is_printed_or_written(tmp_path: Path) -> None:
    printed = CliRunner().invoke(schema, [], standalone_mode=False).output
    CliRunner().invoke(schema, ["-o", str(tmp_path / "schema.json")], standalone_mode=False)
    assert json.loads(printed) == json.loads((tmp_path / "schema.json").read_text()) == config_schema()
