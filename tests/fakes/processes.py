"""Processes that a test stops and lets go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.fakes.polling import wait_until


def freeze(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread stands still: on a busy machine some run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _is_frozen(pid), interval_s=0.002)


def _is_frozen(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    try:
        return all((thread / "stat").read_text().rpartition(") ")[2].startswith("T") for thread in threads)
    except FileNotFoundError:  # a thread ended just now
        return False
