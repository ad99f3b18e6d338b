"""``dynaplan logs``: the end of each log, and all that is written after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dynaplan.cli import logs


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the command; each of ``then`` happens between two looks of ``--follow``, and Ctrl-C after them."""
    monkeypatch.setattr(logs, "connect", lambda _: SimpleNamespace(log_dir=tmp_path))

    def call(*arguments: str, then: tuple[Callable[[], object], ...] = ()) -> list[str]:
        steps = iter(then)

        def next_step(_: float) -> None:
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

        monkeypatch.setattr("dynaplan.cli.logs.time.sleep", next_step)
        return CliRunner().invoke(logs.command, list(arguments)).output.splitlines()

    return call


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_the_last_lines_are_printed_also_one_that_is_not_complete(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    append(tmp_path / "ns_Worker.log", "a\nb\nc")
    assert run("ns_Worker", "-n", "2") == ["b", "c"]
    assert run("ns_Worker", "-n", "0") == []
    assert run() == ["a", "b", "c"]


def test_long_lines_are_printed_whole_and_as_many_as_short_ones(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    written = [f"{number} " + "ä" * 5000 for number in range(10)]
    append(tmp_path / "ns_Worker.log", "".join(f"{line}\n" for line in written))
    assert run("ns_Worker", "-n", "3") == written[-3:]
    assert run("ns_Worker", "-n", "30") == written


def test_a_line_that_is_completed_while_it_is_followed_is_printed_once_and_whole(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    log = tmp_path / "ns_Worker.log"
    append(log, "a\nb")
    then = (lambda: append(log, "c\nd"), lambda: append(log, "\n"))
    assert run("ns_Worker", "-f", then=then)[:3] == ["a", "bc", "d"]
    assert run("ns_Worker", "-f", "-n", "0", then=(lambda: append(log, "e\n"),))[:1] == ["e"]


def test_what_is_written_between_the_end_and_the_first_look_is_followed(
    run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "ns_Worker.log"
    append(log, "a\n")
    echo = logs.click.echo

    def echo_slowly(line: str) -> None:
        echo(line)
        if line == "a":
            append(log, "b\n")

    monkeypatch.setattr("dynaplan.cli.logs.click.echo", echo_slowly)
    assert run("ns_Worker", "-f")[:2] == ["a", "b"]


def test_a_turned_over_log_is_followed_to_its_end_and_then_its_successor(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    log = tmp_path / "ns_Worker.log"
    append(log, "a\n")

    def turn_over() -> None:
        append(log, "b\n")
        log.rename(tmp_path / "ns_Worker.log.1")
        append(log, "c\n")

    assert run("ns_Worker", "-f", then=(turn_over,))[:3] == ["a", "b", "c"]


def test_the_log_of_a_worker_that_comes_later_is_followed_where_all_are(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    append(tmp_path / "ns_Worker.log", "a\n")
    then = (lambda: append(tmp_path / "ns_Worker_1.log", "b\n"),)
    assert run("-f", then=then)[:2] == ["a", "ns_Worker_1: b"]
    assert "c" not in run("ns_Worker", "-f", then=(lambda: append(tmp_path / "ns_Other.log", "c\n"),))
