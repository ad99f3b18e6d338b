"""What was measured is not measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.lab.profiling.stage import JOURNAL_FILE, Journal, fingerprint
from dynaplan.util.errors import ConfigError

KEY = {"kind": "prefill", "isl_tokens": 100, "fingerprint": "a"}
VALUES = {"isl_tokens": 100, "ttft_ms": 12.5}


def test_the_next_run_finds_what_was_written_down(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    assert Journal(tmp_path).find(KEY) == VALUES


def test_another_configuration_finds_nothing(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    assert Journal(tmp_path).find({**KEY, "fingerprint": "b"}) is None


def test_a_line_that_was_cut_off_is_measured_anew_and_costs_no_other(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"key": {"kind": "pre')
    other = {**KEY, "isl_tokens": 200}
    journal = Journal(tmp_path)
    assert journal.find(KEY) == VALUES
    journal.add(other, VALUES)
    assert Journal(tmp_path).find(other) == VALUES


def test_a_file_that_is_none_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(ConfigError, match=JOURNAL_FILE):
        Journal(tmp_path)


def test_a_fingerprint_is_of_the_values_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
