"""The kernel shows of a process what it is told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynaplan.process import process_view

SHOWS = """
from dynaplan.process.process_view import show_as
for words, variables in (([], {}), (["a", "b c"], {"A": "1", "LONG": "x" * 300_000})):
    show_as(words, variables)
    print(open("/proc/self/cmdline").read().encode(), len(open("/proc/self/environ").read()))
"""


def test_any_length_is_shown_as_after_an_exec() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["b'' 0", f"b'a\\x00b c\\x00' {len('A=1.LONG=.') + 300_000}"]


def test_a_kernel_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process_view, "PR_SET_MM_MAP", 99
    )  # no such thing: as without CONFIG_CHECKPOINT_RESTORE
    with pytest.raises(OSError, match="Invalid argument"):
        process_view.show_as(["a"], {})
