"""What a simulation of many requests takes: the peak of the memory of a process that does nothing else.

``python -m tests.bench.memory REQUESTS`` prints that of one, in MiB.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.outcome import Slo
from tests.bench.table import Row

RATE = 100
"""Requests/s: the longer trace lasts longer."""

MOST_MIB = 64.0


def rows(repeats: int) -> Iterator[Row]:
    """Measured once: it hardly varies, and takes its time."""
    for requests in (10_000, 100_000):
        command = [sys.executable, "-m", "tests.bench.memory", str(requests)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        yield Row(f"simulate {requests} requests, policy sla: peak", "MiB", [float(answer.stdout)], MOST_MIB)


def peak_mib(requests: int) -> float:
    """The most that this process has held until the end of such a simulation.

    By the kernel's ``VmHWM``: ``ru_maxrss`` would also count what the process that started this one held.
    """
    load = f"poisson:rate={RATE},duration={requests / RATE},isl=200,osl=10"
    list(run_simulations(SimulateOptions(load, ("sla",), slo=Slo(500.0, 20.0))))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


if __name__ == "__main__":
    print(peak_mib(int(sys.argv[1])))
