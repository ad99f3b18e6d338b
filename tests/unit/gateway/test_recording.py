"""A recording of traffic: what is in a line, who writes to the file, and what must not hurt."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.gateway import recording
from dynaplan.gateway.openai_api import NO_BLOCKS, PromptBlocks
from dynaplan.gateway.recording import TrafficRecording
from dynaplan.simulation.traces.reading import read_requests
from dynaplan.util.errors import ConfigError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(path: Path, zero_s: float = 0.0) -> TrafficRecording:
    """A recording of a process whose clock stood at ``zero_s`` just now."""
    return TrafficRecording(path, lambda: zero_s)


async def test_a_line_is_a_traced_request_and_the_first_one_says_since_when(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path, zero_s=100.0)
    here.add(100.5, 37, 7, NO_BLOCKS)
    here.add(101.75, 40, 5, NO_BLOCKS)
    await here.write()
    first, second = lines(path)
    assert first.pop("began_unix_s") > 1e9
    assert first == TracedRequest(0.0, 37, 7).to_json()
    assert second == TracedRequest(1.25, 40, 5).to_json()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_equal_beginnings_have_equal_hashes_that_are_not_the_routers(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    for hashes in ((11, 12, 13), (11, 12, 99)):
        here.add(0.0, 48, 1, PromptBlocks(hashes, 16))
    await here.write()
    one, other = lines(path)
    assert one["block_tokens"] == 16
    assert one["block_hashes"][:2] == other["block_hashes"][:2]
    assert one["block_hashes"][2] != other["block_hashes"][2]
    assert not {11, 12, 13, 99} & {*one["block_hashes"], *other["block_hashes"]}
    assert max(one["block_hashes"]) < 2**recording.HASH_BITS


async def test_a_prompt_has_no_more_blocks_than_the_engine_counted_tokens(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    here.add(0.0, 33, 1, PromptBlocks((1, 2, 3), 16))
    here.add(0.0, 9, 1, PromptBlocks((1, 2, 3), 16))
    await here.write()
    assert [len(each.get("block_hashes", ())) for each in lines(path)] == [2, 0]


async def test_a_second_frontend_and_a_later_one_go_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    one, other = opened(path, zero_s=0.0), opened(path, zero_s=5000.0)
    one.add(10.0, 1, 1, NO_BLOCKS)
    await one.write()
    other.add(5012.0, 2, 2, NO_BLOCKS)
    await other.write()
    one.add(11.0, 3, 3, NO_BLOCKS)
    await one.write()
    arrivals = [each["arrival_s"] for each in lines(path)]
    assert arrivals == pytest.approx([0.0, 2.0, 1.0], abs=0.5)
    assert ["began_unix_s" in each for each in lines(path)] == [True, False, False]
    read = list(read_requests(str(path), 1.0, 1))
    assert [each.prompt_tokens for each in read] == [1, 3, 2]


async def test_a_recording_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    for number in range(2):
        here.add(float(number), 1, 1, NO_BLOCKS)
        await here.write()
        path.rename(tmp_path / f"{number}.jsonl")
    first = [lines(tmp_path / f"{number}.jsonl")[0]["arrival_s"] for number in range(2)]
    assert [str(each) for each in first] == ["0.0", "0.0"]


async def test_what_a_killed_writer_left_of_a_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    here.add(0.0, 1, 1, NO_BLOCKS)
    await here.write()
    with path.open("a") as file:
        file.write('{"arrival_s":' + "1" * 70_000)
    here.add(0.0, 2, 2, NO_BLOCKS)
    await here.write()
    assert [each["prompt_tokens"] for each in lines(path)] == [1, 2]


async def test_a_file_that_cannot_be_written_or_is_something_else_is_a_configuration_error(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("buy milk\n")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "nowhere" / "traffic.jsonl", notes, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"Frontend\.record-traffic") as raised:
            opened(path)
        assert str(path) in str(raised.value)
    assert notes.read_text() == "buy milk\n"


async def test_a_full_disk_costs_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynaplan.gateway.recording")
    path = tmp_path / "traffic.jsonl"
    here = opened(path)

    async def record(prompt_tokens: int) -> None:
        here.add(0.0, prompt_tokens, 1, NO_BLOCKS)
        await here.write()

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    await record(1)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_write_all", full)
        await record(2)
        await record(3)
    await record(4)
    assert [each["prompt_tokens"] for each in lines(path)] == [1, 4]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "No space left" in told[0]
    assert told[1].endswith("again")


async def test_a_disk_that_takes_nothing_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_REQUESTS", 3)
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    for number in range(9):
        here.add(float(number), 1, 1, NO_BLOCKS)
    await here.write()
    assert len(lines(path)) == 3


async def test_many_lines_are_written_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    here = opened(path)
    for number in range(3 * recording.LINES_AT_ONCE + 1):
        here.add(0.0, number, 1, NO_BLOCKS)
    await here.write()
    assert [each["prompt_tokens"] for each in lines(path)] == list(range(3 * recording.LINES_AT_ONCE + 1))
