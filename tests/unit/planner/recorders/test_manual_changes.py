"""The record of what persons change by hand."""

from __future__ import annotations

from pathlib import Path

from dynaplan.planner.recorders.manual_changes import (
    FILE_NAME,
    ManualChange,
    manual_changes,
    record_manual_change,
)

SCALED = ManualChange(10.0, "alice", "decode 4 -> 2", {"decode": 4}, {"decode": 2}, 7)
PINNED = ManualChange(20.0, "bob", "model qwen: pin")


def test_what_was_recorded_is_read_back_the_last_ones_of_this_deployment(tmp_path: Path) -> None:
    for each in (SCALED, PINNED):
        record_manual_change(tmp_path, each)
    assert manual_changes(tmp_path, 5) == [SCALED, PINNED]
    assert manual_changes(tmp_path, 1) == [PINNED]
    assert manual_changes(tmp_path, 5, since_s=15.0) == [PINNED]
    assert str(SCALED) == "by hand (alice): decode 4 -> 2"


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert manual_changes(tmp_path, 5) == []
    record_manual_change(tmp_path, SCALED)
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"at_unix_s": "noon"}\n[]\n\xff\n{"at_unix_s": 1, "by": "x", "what"')
    assert manual_changes(tmp_path, 5) == [SCALED]


def test_a_directory_that_cannot_be_written_costs_the_line_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in its place")
    record_manual_change(tmp_path / "logs", SCALED)
    assert manual_changes(tmp_path / "logs", 5) == []
