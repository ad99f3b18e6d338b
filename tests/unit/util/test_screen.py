"""The width and the colours of the reader's screen."""

from __future__ import annotations

import os

import click
import pytest

from dynaplan.graph.lifecycle import WorkerState
from dynaplan.util import screen


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert screen.width() == 0


def test_a_terminal_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((77, 24)))
    assert screen.width() == 77


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [({}, None), ({"NO_COLOR": ""}, None), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_the_user_and_the_terminal_may_refuse_colours(environ: dict[str, str], wanted: bool | None) -> None:
    assert screen.colours_wanted(environ) is wanted


def test_every_state_but_the_last_has_a_colour() -> None:
    plain = {each for each in WorkerState if screen.state_coloured(each.value) == each.value}
    assert plain == {WorkerState.STOPPED}
    assert screen.state_coloured("loading 00:23") == click.style("loading 00:23", fg="yellow")
    assert click.unstyle(screen.state_coloured("unheard of")) == "unheard of"
