"""Manifests on disk and on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynaplan.cli.exporting.writing import print_documents, write_documents, yaml_of
from dynaplan.domain.errors import ConfigError

SECRET = {"kind": "Secret", "metadata": {"name": "box-secret"}, "stringData": {"token": "t"}}
MAP = {"kind": "ConfigMap", "metadata": {"name": "box-graph"}, "data": {"graph.yaml": "a: 1\nb: on\n"}}


def test_what_is_written_is_read_back_and_a_file_in_it_stays_readable() -> None:
    text = yaml_of([SECRET, MAP])
    assert list(yaml.safe_load_all(text)) == [SECRET, MAP]
    assert "graph.yaml: |\n    a: 1\n" in text


def test_objects_are_files_that_nobody_else_reads(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    for _ in range(2):
        write_documents([SECRET, MAP], directory)
    files = {each.name: each.stat().st_mode & 0o777 for each in directory.iterdir()}
    assert files == {"secret-box-secret.yaml": 0o600, "configmap-box-graph.yaml": 0o600}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file/out: Not a directory"):
        write_documents([SECRET], tmp_path / "file" / "out")


def test_whoever_prints_a_secret_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_documents([SECRET])
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out) == SECRET
    assert "keep it to yourself" in printed.err
