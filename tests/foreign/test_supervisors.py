"""What starts dynaplan has habits of its own: serve runs below any of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

CLOSED = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-P", "-m", "dynaplan"]
"""The command dynaplan below a parent that has closed the standard streams, as daemons do."""


def test_closed_standard_streams_are_no_fault(tmp_path: Path) -> None:
    made = Deployment(tmp_path, "graphs.agg:Frontend", "agg.yaml")
    ask = [*CLOSED, "status", made.namespace]
    process = made.process = subprocess.Popen([*CLOSED, *made.command[1:]], env=made.environment)

    def answers() -> bool:
        is_over = process.poll() is not None
        return is_over or subprocess.run(ask, env=made.environment).returncode == 0

    try:
        wait_until(answers)
        assert process.poll() is None
    finally:
        made.close()
    assert process.returncode == 0
