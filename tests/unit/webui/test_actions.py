"""An action of the page is one of a few commands, and nothing that a request says becomes an option."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynaplan.webui import actions
from dynaplan.webui.actions import PART_BYTES, command_arguments, log_part, run_command
from tests.fakes.polling import eventually


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ({"do": "scale", "role": "decode", "by": 1}, ["scale", "decode=+1", "--no-wait"]),
        ({"do": "scale", "role": "prefill", "by": -1}, ["scale", "prefill=-1", "--no-wait"]),
        ({"do": "hold", "role": "decode"}, ["scale", "decode=+0", "--hold", "--no-wait"]),
        ({"do": "release", "role": "decode"}, ["release", "decode"]),
        (
            {"do": "drain", "role": "decode", "worker": "ns_VllmWorker_1"},
            ["scale", "decode=-1", "--leaving", "ns_VllmWorker_1", "--no-wait"],
        ),
        ({"do": "restart", "worker": "ns_VllmWorker"}, ["restart", "ns_VllmWorker"]),
        ({"do": "load", "model": "<b>a</b> b"}, ["load", "<b>a</b> b", "--no-wait"]),
        ({"do": "unload", "model": "a"}, ["unload", "a", "--no-wait"]),
        ({"do": "pin", "model": "a"}, ["pin", "a", "--no-wait"]),
        ({"do": "unpin", "model": "a"}, ["unpin", "a"]),
    ],
)
def test_each_action_is_a_command(action: dict[str, Any], arguments: list[str]) -> None:
    assert command_arguments(action) == arguments


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"do": "stop"},
        {"do": "scale", "role": "decode", "by": 5},
        {"do": "scale", "role": "frontend", "by": 1},
        {"do": "scale", "role": "decode", "by": "1"},
        {"do": "hold", "role": "--help"},
        {"do": "release", "role": None},
        {"do": "restart", "worker": "--namespace"},
        {"do": "restart", "worker": "a/b"},
        {"do": "restart", "worker": "a\n"},
        {"do": "drain", "role": "decode", "worker": ["x"]},
        {"do": "drain", "worker": "x"},
        {"do": "load", "model": "--for=2h"},
        {"do": "unload", "model": ""},
        {"do": "pin", "model": "a\n"},
        {"do": "unpin", "model": 3},
    ],
    ids=str,
)
def test_anything_else_is_none(action: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no such action"):
        command_arguments(action)


async def test_what_a_command_writes_is_returned_its_errors_too() -> None:
    assert "No such command" in await run_command(["no-such-command"])


INTERRUPTED = """
import pathlib, sys, time
place = pathlib.Path(sys.argv[1])
try:
    (place / "begun").touch()
    time.sleep(600)
except KeyboardInterrupt:
    (place / "taken back").touch()
"""


async def test_a_command_that_is_cancelled_takes_back_what_it_has_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "restart.py"
    script.write_text(INTERRUPTED)
    start, has_started = actions.start_process, asyncio.Event()

    async def start_script(*command: str, **options: Any) -> Any:
        process = await start(command[0], str(script), str(tmp_path), **options)
        has_started.set()
        return process

    monkeypatch.setattr(actions, "start_process", start_script)
    running = asyncio.create_task(run_command(["restart"]))
    await has_started.wait()  # until then a cancellation kills it
    await eventually(lambda: (tmp_path / "begun").exists())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "taken back").exists()


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
