"""The log's lines: whole, or nothing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.store.file import log as module
from dynaplan.store.file.log import LogDamaged, StoreLog, line_of, parsed

HEADER = {"identity": "x", "number": 0, "leases": [], "items": []}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "log").write_bytes(line_of(HEADER))
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=9)))
def test_a_line_is_read_as_it_was_written(record: dict[str, str]) -> None:
    line = line_of(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parsed(line[:-1]) == record


@given(st.binary(max_size=40))
def test_other_bytes_are_no_record(line: bytes) -> None:
    assert parsed(line) is None


def test_records_are_read_once_and_in_order(directory: int) -> None:
    log, writer = StoreLog(directory, "log"), StoreLog(directory, "log")
    for number in (1, 2, 3):
        writer.append({"number": number})
        writer.read_on()
    assert [each["number"] for each in log.read_on()] == [1, 2, 3]
    assert log.read_on() == []
    assert [each["number"] for each in log.records_after(1)] == [2, 3]
    log.close()
    writer.close()


@given(st.integers(min_value=1, max_value=len(line_of({"number": 1})) - 1))
def test_a_line_that_is_not_whole_does_not_count_and_is_cut_off(cut: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "log")
        path.write_bytes(line_of(HEADER) + line_of({"number": 1})[:cut])
        fd = os.open(place, os.O_RDONLY)
        log = StoreLog(fd, "log")
        assert log.read_on() == []
        log.append({"number": 1, "put": {}})
        assert log.read_on() == [{"number": 1, "put": {}}]
        assert path.read_bytes() == line_of(HEADER) + line_of({"number": 1, "put": {}})
        log.close()
        os.close(fd)


def test_a_record_that_finds_no_room_leaves_nothing(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "full")

    log = StoreLog(directory, "log")
    monkeypatch.setattr(module, "write_all", half)
    with pytest.raises(OSError, match="full"):
        log.append({"number": 1})
    assert os.stat("log", dir_fd=directory).st_size == log.offset
    log.close()


@pytest.mark.parametrize("line", [b"rubbish\n", line_of({"number": 3}), line_of({"no": "number"}), b"\n"])
def test_a_whole_line_that_is_wrong_is_damage_after_what_precedes_it(directory: int, line: bytes) -> None:
    log = StoreLog(directory, "log")
    log.append({"number": 1})
    fd = os.open("log", os.O_WRONLY | os.O_APPEND, dir_fd=directory)
    os.write(fd, line)
    os.close(fd)
    assert log.read_on() == [{"number": 1}]
    with pytest.raises(LogDamaged):
        log.read_on()
    log.close()


@pytest.mark.parametrize("text", [b"", b"\0\0\0", b"rubbish\n", line_of({"number": 0})])
def test_a_file_without_a_header_is_no_log(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "log").write_bytes(text)
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(LogDamaged):
        StoreLog(fd, "log")
    os.close(fd)
