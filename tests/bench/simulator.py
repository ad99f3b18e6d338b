"""What a simulation costs: the public Azure hour, for a split that stands still, and planned with ``sla``.

CPU seconds of a process of its own for each run, reading the trace included, imports not.
``python -m tests.bench.simulator POLICY RATE_SCALE`` prints that of one, in seconds, and its requests.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from dynaplan.lab.simulate.policy_runs import run_simulations
from tests.bench.cases import AZURE_HOUR
from tests.bench.table import Row

LARGE_SCALE = 8.0
"""Times as many requests as came: 155,000."""


def rows(repeats: int) -> Iterator[Row]:
    """Yield the cost of a request, of the hour with the planner, and of eight times the hour."""
    still = [_measured("static:2,2", 1.0) for _ in range(repeats)]
    yield Row("a simulated request, split 2 + 2", "µs", [1e6 * cpu_s / came for cpu_s, came in still], 38.0)
    planned = [_measured("sla", 1.0) for _ in range(repeats)]
    yield Row("the Azure hour with sla", "s of CPU", [cpu_s for cpu_s, _ in planned], 6.0)
    large = [_measured("static:8,16", LARGE_SCALE) for _ in range(repeats)]
    note = f"{large[0][1]:,} requests"
    yield Row(
        "the hour at 8 times its rate, split 8 + 16", "s of CPU", [each[0] for each in large], 25.0, note=note
    )


def _measured(policy: str, rate_scale: float) -> tuple[float, int]:
    command = [sys.executable, "-m", "tests.bench.simulator", policy, str(rate_scale)]
    cpu_s, came = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(cpu_s), int(came)


def _main(policy: str, rate_scale: str) -> None:
    hour = replace(AZURE_HOUR, policies=(policy,), rate_scale=float(rate_scale), gpus=24, first=None)
    begun_s = time.process_time()
    [result] = run_simulations(hour)
    print(time.process_time() - begun_s, result.outcome.requests)


if __name__ == "__main__":
    _main(*sys.argv[1:])
