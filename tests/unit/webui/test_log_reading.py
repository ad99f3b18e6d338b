"""A log is read in parts, from its end on, and no name leads out of its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.webui.log_reading import PART_BYTES, log_part


def test_a_part_ends_where_the_next_begins(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("one\n")
    text, end = log_part(tmp_path, "worker", -1)
    assert (text, end) == ("one\n", 4)
    assert log_part(tmp_path, "worker", end) == ("", 4)
    log.write_text("one\ntwo\n")
    assert log_part(tmp_path, "worker", end) == ("two\n", 8)


def test_of_a_long_log_the_end_is_shown_from_a_whole_line_on(tmp_path: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "worker.log").write_text(lines)
    text, end = log_part(tmp_path, "worker", -1)
    assert PART_BYTES - 20 < len(text) <= PART_BYTES
    assert text.startswith("line ")
    assert lines.endswith(text)
    assert end == len(lines)


def test_a_log_that_began_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("new\n")
    assert log_part(tmp_path, "worker", 4096) == ("new\n", 4)


def test_a_character_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    whole = "ä€😀".encode()
    for length in range(len(whole) + 1):
        (tmp_path / "worker.log").write_bytes(whole[:length])
        text, end = log_part(tmp_path, "worker", 0)
        assert "\ufffd" not in text
        assert text.encode() == whole[:end]


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_bytes(b"\xff\x80\x80\x80\x80")
    assert log_part(tmp_path, "worker", 0)[1] == 5


@pytest.mark.parametrize("name", ["", "..", "../secret", "/etc/passwd", "a\x00b", "-", "missing"])
def test_no_other_file_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret.log").write_text("secret")
    with pytest.raises(OSError):
        log_part(tmp_path / "logs", name, -1)


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "worker.log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        log_part(tmp_path, "worker", -1)
