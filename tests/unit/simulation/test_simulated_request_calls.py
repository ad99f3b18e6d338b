"""What a simulated request costs, in calls of functions: the planner simulates all day.

Time depends on the machine, the number of calls does not. A change that costs more of them changes the
baseline here, and says in its commit what it buys. Calls into C count too.
"""

from __future__ import annotations

import sys
from types import FrameType

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations

CALLS_OF_REQUEST = 242
"""Two prefill and two decode workers under a load that keeps them half busy; the trace is read as well."""


def test_a_simulated_request_makes_no_more_calls_than_the_baseline() -> None:
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    load = "sinusoid:low=3,high=8,duration=120,isl=1155,osl=211,isl-cv=1,osl-cv=0.8"
    results = run_simulations(SimulateOptions(load, ("static:2,2",)))
    sys.setprofile(note)
    try:
        [result] = results
    finally:
        sys.setprofile(None)
    of_request = calls / result.outcome.requests
    assert of_request <= CALLS_OF_REQUEST, f"{of_request:.0f} calls for each request"
    assert of_request > 0.9 * CALLS_OF_REQUEST, f"{of_request:.0f} calls: lower the baseline"
