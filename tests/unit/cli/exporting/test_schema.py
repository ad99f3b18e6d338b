"""``dynaplan export schema``: the schema as a file."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from dynaplan.cli.exporting.schema import command
from dynaplan.options.schema import config_schema


def test_the_schema_is_printed_or_written(tmp_path: Path) -> None:
    printed = CliRunner().invoke(command, [], standalone_mode=False).output
    CliRunner().invoke(command, ["-o", str(tmp_path / "schema.json")], standalone_mode=False)
    assert json.loads(printed) == json.loads((tmp_path / "schema.json").read_text()) == config_schema()
