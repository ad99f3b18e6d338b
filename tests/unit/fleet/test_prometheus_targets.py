"""The file with the targets of a Prometheus server."""

from __future__ import annotations

import json
from pathlib import Path

from dynaplan.fleet.prometheus_targets import TARGETS_FILE, prometheus_targets


def test_it_names_the_frontends_while_they_run(tmp_path: Path) -> None:
    path = tmp_path / TARGETS_FILE
    with prometheus_targets(tmp_path, "https://127.0.0.1:8443"):
        (group,) = json.loads(path.read_text())
    assert group["targets"] == ["127.0.0.1:8443"]
    assert group["labels"] == {"__scheme__": "https", "__metrics_path__": "/metrics/all"}
    assert json.loads(path.read_text()) == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_hurts_nobody(tmp_path: Path) -> None:
    with prometheus_targets(tmp_path / "gone", "http://127.0.0.1:8000"):
        assert not (tmp_path / "gone").exists()
