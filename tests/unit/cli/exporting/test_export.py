"""``dynaplan export``: a group of targets, each imported on use."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from dynaplan.cli.exporting.export import TARGETS
from dynaplan.cli.main import group


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_is_a_command(target: str) -> None:
    result = CliRunner().invoke(group, ["export", target, "--help"])
    assert result.exit_code == 0
    assert f"export {target}" in result.output


def test_a_misspelt_target_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(group, ["export", "graphana"])
    assert result.exit_code == 2
    assert "No such command 'graphana'. Did you mean 'grafana'?" in result.output


def test_the_help_page_imports_no_target() -> None:
    script = (
        "import sys; from dynaplan.cli.main import main\n"
        "try: main(['export', '--help'])\n"
        "except SystemExit: print([each for each in sys.modules if 'cli.exporting.' in each])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "prometheus" in result.stdout
    assert result.stdout.endswith("['dynaplan.cli.exporting.export']\n")
