"""The planner takes its profile and its history along."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.cluster import planner_files as module
from dynaplan.cluster.planner_files import history, planner_files
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.forecasting.traffic_history import interval_history
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.util.errors import ConfigError


def record(requests: float | None, isl: float | None = 100.0) -> dict[str, Any]:
    traffic = {"interval_s": 30.0, "requests": requests, "isl_tokens": isl, "osl_tokens": isl}
    return {
        "wall_time": "2026-01-01T00:00:00+00:00",
        "settings": {"adjustment-interval": 30.0},
        "observation": {"traffic": traffic},
        "decision": {},
    }


def targets(**options: Any) -> PlannerSettings:
    return PlannerSettings.from_options({"policy": "sla", **options})


def write_decisions(directory: Path, records: list[dict[str, Any]]) -> Path:
    folder = directory / "planner" / "20260101_000000"
    folder.mkdir(parents=True)
    (folder / "decisions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return directory


def test_a_planner_without_targets_needs_no_files(tmp_path: Path) -> None:
    found = planner_files(PlannerSettings(), write_decisions(tmp_path, [record(1)]))
    assert (found.contents, found.options) == ({}, {})


def test_a_directory_of_a_profile_is_copied_whole_but_for_its_plots(tmp_path: Path) -> None:
    half = tmp_path / "selected_prefill_interpolation"
    half.mkdir()
    (half / "raw_data.npz").write_bytes(b"PK\xff")
    (tmp_path / "plot.svg").write_text("<svg/>")
    found = planner_files(targets(**{"profile-results-dir": str(tmp_path)}), None)
    assert found.contents == {"profile/selected_prefill_interpolation/raw_data.npz": b"PK\xff"}
    assert found.options == {"profile-results-dir": "/etc/dynaplan/planner/profile"}


def test_a_profile_in_a_file_keeps_its_name_and_a_shipped_one_is_in_the_image(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")
    found = planner_files(targets(**{"profile-results-dir": str(file)}), None)
    assert found.options == {"profile-results-dir": "/etc/dynaplan/planner/profile/mine.json"}
    shipped = planner_files(targets(**{"profile-results-dir": "h200_sxm-Llama-3.1-8B-Instruct-FP8"}), None)
    assert (shipped.contents, shipped.options) == ({}, {})


def test_what_the_last_planner_measured_begins_the_next_ones_history(tmp_path: Path) -> None:
    logs = write_decisions(tmp_path, [record(4), record(None), record(0, None), record(6, 50.0), record(1)])
    found = planner_files(targets(), logs)
    name = "decisions.jsonl.gz"
    assert found.options == {"load-predictor-warmup-trace": f"/etc/dynaplan/planner/history/{name}"}
    file = tmp_path / name
    file.write_bytes(found.contents[f"history/{name}"])
    loads = interval_history(read_trace(file), 30.0)
    assert [(each.requests, each.isl_tokens) for each in loads] == [(4, 100), (0, None), (6, 50)]


def test_a_trace_of_the_users_own_comes_before_the_decisions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n')
    found = planner_files(
        targets(**{"load-predictor-warmup-trace": str(trace)}), write_decisions(tmp_path, [record(1)])
    )
    assert gzip.decompress(found.contents["history/trace.gz"]) == trace.read_bytes()
    made_up = planner_files(targets(**{"load-predictor-warmup-trace": "sinusoid:1"}), tmp_path)
    assert made_up.contents == {}


@pytest.mark.parametrize("records", [None, [{"observation": {"traffic": None}}]])
def test_without_measured_traffic_there_is_no_history(tmp_path: Path, records: list[Any] | None) -> None:
    logs = tmp_path if records is None else write_decisions(tmp_path, records)
    assert planner_files(targets(), logs).contents == {}


def test_the_oldest_decisions_go_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HISTORY_BYTES", 400)
    kept = [json.loads(line) for line in gzip.decompress(history(record(n) for n in range(600))).splitlines()]
    assert 0 < len(kept) < 500
    assert kept[-1] == record(599)


def test_the_planners_memory_takes_no_room_from_the_traffic() -> None:
    memory = {"state": {"hedge": [0.1] * 5000}, "next_state": {"hedge": [0.2] * 5000}}
    assert gzip.decompress(history([{**record(1), **memory}])) == gzip.decompress(history([record(1)]))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"mine\.json cannot be read: Permission denied"):
        planner_files(targets(**{"profile-results-dir": str(file)}), None)
