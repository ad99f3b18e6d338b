"""What the planner costs: to import, to hold in memory, and per step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from tests.bench.table import Row

IMPORT = """
import resource, time
started_s = time.perf_counter()
import dynaplan.planner.assembly, dynaplan.planner.loop
seconds = time.perf_counter() - started_s
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
STEPS = 2000


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group."""
    results = [_imported() for _ in range(repeats)]
    yield Row("planner import", "s", [seconds for seconds, _ in results], aim=0.5)
    yield Row(
        "planner memory", "MiB", [mebibytes for _, mebibytes in results], aim=80, note="maximum resident"
    )
    yield Row("planner decision", "ms", [_step_ms() for _ in range(repeats)], aim=1.0)


def _imported() -> tuple[float, float]:
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    seconds, mebibytes = result.stdout.split()
    return float(seconds), float(mebibytes)


def _step_ms() -> float:
    """One decision, of a fleet that is neither idle nor full."""
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.planner.model import PlannerState
    from dynaplan.planner.rules.decision import decide
    from tests.unit.planner.rules.situations import interval

    settings, state, seen = PlannerSettings(), PlannerState(), interval(2, 3, 0.7, [1.0] * 31)
    started_s = time.perf_counter()
    for _ in range(STEPS):
        state, _ = decide(settings, state, seen)
    return 1000 * (time.perf_counter() - started_s) / STEPS
