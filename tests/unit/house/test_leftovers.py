"""A session of tests finds and ends what it has left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.polling import wait_until
from tests.leftovers import MARK, end_leftovers, mark_session, marked

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(MARK, os.environ.get(MARK, ""))
    yield mark_session()


def test_what_outlives_the_session_is_killed_with_its_children_and_named(mark: str) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True) as child:
        # Between fork and exec the child has its parent's command line, and in exec none for a moment.
        wait_until(lambda: sorted("subprocess" in each for each in marked(mark).values()) == [False, True])
        left = end_leftovers(mark, within_s=0.0)
    assert len(left) == 2
    assert "import subprocess" in left[child.pid]
    assert child.returncode == -9
    wait_until(lambda: marked(mark) == {})


def test_what_ends_in_time_is_not_left_behind(mark: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: list(marked(mark)) == [child.pid])  # in exec it has no environment for a moment
        assert child.stdin is not None
        child.stdin.close()
        assert end_leftovers(mark) == {}


def test_processes_of_other_sessions_are_left_alone(mark: str) -> None:
    other = {**os.environ, MARK: "another"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=other) as child:
        assert end_leftovers(mark, within_s=0.0) == {}
        assert child.poll() is None
        child.communicate()
