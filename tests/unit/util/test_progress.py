"""The line of progress: on a terminal, and elsewhere."""

from __future__ import annotations

import io

import pytest

from dynaplan.util.progress import CLEAR, ProgressLine, left_words, time_left_s


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


class World:
    def __init__(self, stream: io.StringIO) -> None:
        self.stream, self.now_s = stream, 0.0
        self.line = ProgressLine(stream, 30.0, lambda: self.now_s)

    def show(self, at_s: float, text: str, news: str | None = None) -> None:
        self.now_s = at_s
        self.line.show(text, news)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")


def test_on_a_terminal_one_line_changes_fits_and_is_erased() -> None:
    world = World(Screen())
    with world.line:
        world.show(0.0, "10 %")
        world.show(0.05, "too soon")
        world.show(0.2, "a text that is longer than the screen")
    drawn = world.stream.getvalue().split(CLEAR)
    assert drawn == ["", "10 %", "a text that is long", ""]


def test_elsewhere_a_line_comes_for_each_change_and_every_half_minute() -> None:
    world = World(io.StringIO())
    with world.line:
        world.show(0.0, "starting 00:00", "starting")
        world.show(5.0, "starting 00:05", "starting")
        world.show(31.0, "starting 00:31", "starting")
        world.show(32.0, "ready", "ready")
    assert world.stream.getvalue().splitlines() == ["starting 00:00", "starting 00:31", "ready"]


def test_without_news_the_first_line_comes_after_half_a_minute() -> None:
    world = World(io.StringIO())
    for at_s in range(100):
        world.show(float(at_s), f"{at_s} %")
    assert world.stream.getvalue().splitlines() == ["30 %", "60 %", "90 %"]


def test_a_dumb_terminal_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    world = World(Screen())
    world.show(0.0, "a", "a")
    world.line.erase()
    assert world.stream.getvalue() == "a\n"


def test_a_reader_that_went_away_ends_nothing() -> None:
    world = World(Screen())
    world.stream.close()
    for at_s in (1.0, 2.0, 100.0):
        world.show(at_s, f"{at_s}", f"{at_s}")
    assert world.stream.closed


def test_the_time_left_goes_on_at_the_pace_until_now() -> None:
    assert time_left_s(25, 100, 10.0) == 30.0
    assert time_left_s(0, 100, 10.0) is None
    assert time_left_s(120, 100, 10.0) == 0.0
    assert left_words(30.0) == "about 00:30 left"
    assert left_words(None) == ""
