"""The daily files of what keys had computed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from dynaplan.gateway.keys.usage import REFUSED, Amounts, KeyUsage, read_usage

DAY = date(2026, 11, 29)


def usage(directory: Path, today: Callable[[], date] = lambda: DAY) -> KeyUsage:
    registry = CollectorRegistry()
    requests = Counter("requests", "", ("namespace", "key", "model", "status"), registry=registry)
    tokens = Counter("tokens", "", ("namespace", "key", "model", "type"), registry=registry)
    return KeyUsage("ns", requests, tokens, directory, today)


def test_several_frontends_add_to_the_file_of_the_day(tmp_path: Path) -> None:
    first, second = usage(tmp_path), usage(tmp_path)
    first.add("alice", "m", "success", 10, 20)
    first.add("alice", "m", "error", 1, 2)
    first.add("alice", "m", REFUSED)
    second.add("alice", "m", "success", 100, 200)
    second.add("bob", "a, b", "success", 5, 6)
    for each in (first, second, first):
        each.write_files()
    file = tmp_path / "2026-11-29.csv"
    assert file.read_text() == (
        'key,model,requests,prompt_tokens,answer_tokens\nalice,m,3,111,222\nbob,"a, b",1,5,6\n'
    )
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_usage(file)["bob", "a, b"] == Amounts(1, 5, 6)


def test_what_no_file_takes_is_written_later(tmp_path: Path) -> None:
    directory = tmp_path / "usage"
    directory.write_text("in the way")
    one = usage(directory)
    one.add("alice", "m", "success", 10, 20)
    one.write_files()
    directory.unlink()
    one.add("alice", "m", "success", 10, 20)
    one.write_files()
    assert read_usage(directory / f"{DAY}.csv") == {("alice", "m"): Amounts(2, 20, 40)}


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / f"{DAY}.csv"
    file.write_text("a,b\n")
    with pytest.raises(ValueError, match="is no file of usage"):
        read_usage(file)
    one = usage(tmp_path)
    one.add("alice", "m", "success", 1, 1)
    one.write_files()
    assert file.read_text() == "a,b\n"


def test_a_line_that_is_none_of_usage_is_left_out_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / f"{DAY}.csv"
    bad = ("bob,m,1,2,3,4", "bob,m,many,2,3", "bob", "")
    file.write_text("\n".join(["key,model,requests,prompt_tokens,answer_tokens", *bad, "bob,m,1,2,3", ""]))
    one = usage(tmp_path)
    for _ in range(2):
        one.add("alice", "m", "success", 10, 20)
        one.write_files()
    assert read_usage(file) == {("alice", "m"): Amounts(2, 20, 40), ("bob", "m"): Amounts(1, 2, 3)}
    assert [each.args[1] for each in caplog.records if isinstance(each.args, tuple)] == list(bad)


def test_a_request_counts_for_the_day_on_which_it_ended(tmp_path: Path) -> None:
    today = DAY
    one = usage(tmp_path, lambda: today)
    one.add("alice", "m", "success", 10, 20)
    today += timedelta(days=1)
    one.add("alice", "m", "success", 1, 2)
    today += timedelta(days=1)
    one.write_files()
    for ago, amounts in ((1, Amounts(1, 10, 20)), (0, Amounts(1, 1, 2))):
        day = DAY + timedelta(days=1 - ago)
        assert read_usage(tmp_path / f"{day}.csv") == {("alice", "m"): amounts}
    assert len(list(tmp_path.iterdir())) == 2
