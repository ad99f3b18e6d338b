"""The oracle's schedules of hours of traffic: found once, each in minutes of CPU, and kept in a file.

``python -m tests.bench.schedules`` finds those that ``schedules.json`` does not have, and writes each down as
soon as it is found; ``bursts`` and ``azure`` simulate them. One is kept by its case and its trace, so that it
is never taken for that of another trace. Its 95 per cent are those of the whole hour.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynaplan.fleet.counts import Targets
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.oracle.oracle import find_oracle
from dynaplan.lab.simulate.oracle.schedule import SchedulePolicy
from dynaplan.lab.simulate.run import Result, simulate
from dynaplan.lab.simulate.simulation import service_settings
from dynaplan.planner import factory
from tests.bench.cases import AZURE, CASES, TRACES, hour_of

FILE = Path(__file__).parent / "schedules.json"

UNMET = "oracle, the SLO is not met"
"""The name of the oracle where none of its schedules meets the SLO: then this is the one that met most."""


def run_oracle(case: str, hour: SimulateOptions) -> Result | None:
    """Simulate the oracle's schedule of that hour; None where none is kept."""
    found = _kept().get(_name(case, hour))
    if found is None:
        return None
    entries = [(at_s, Targets(prefill, decode)) for at_s, prefill, decode in found["schedule"]]
    trace = factory.read_requests(hour.trace, hour.rate_scale, hour.seed)
    policy = SchedulePolicy("oracle" if found["is_slo_met"] else UNMET, entries)
    return simulate(trace, service_settings(hour), entries[0][1], policy)


def find(case: str, hour: SimulateOptions) -> None:
    """Find the schedule of that hour, and write it down."""
    trace = list(factory.read_requests(hour.trace, hour.rate_scale, hour.seed))
    oracle = find_oracle(lambda: trace, service_settings(hour))
    entries = [[at_s, targets.prefill, targets.decode] for at_s, targets in oracle.schedule]
    found = {"is_slo_met": oracle.verdict.is_slo_met, "schedule": entries}
    kept = {**_kept(), _name(case, hour): found}
    lines = [f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _kept() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def _name(case: str, hour: SimulateOptions) -> str:
    return f"{case}: {Path(hour.trace).name}"


if __name__ == "__main__":
    hours = [(case, hour_of(case, name)) for case in CASES for name in TRACES]
    for case, hour in [*hours, *AZURE.items()]:
        if _name(case, hour) not in _kept():
            find(case, hour)
