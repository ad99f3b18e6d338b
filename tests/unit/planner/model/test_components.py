"""Workers are missing while fewer are ready than are asked for."""

from __future__ import annotations

import pytest

from dynaplan.fleet.counts import FleetCounts, WorkerCounts
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model.components import DeployedComponents, ScaledComponent, missing_workers


def test_components_are_found_by_role() -> None:
    decode = ScaledComponent(Role.DECODE, "d")
    deployed = DeployedComponents((ScaledComponent(Role.PREFILL, "p"), decode))
    assert deployed.of(Role.DECODE) == (decode,)


@pytest.mark.parametrize(
    ("prefill", "decode", "desired", "expected"),
    [
        (WorkerCounts(ready=1), WorkerCounts(ready=2), DesiredCounts(1, 2), ""),
        (WorkerCounts(), WorkerCounts(asleep=1), DesiredCounts(), ""),
        (WorkerCounts(), WorkerCounts(ready=2, draining=1), DesiredCounts(-1, 1), ""),
        (WorkerCounts(), WorkerCounts(), DesiredCounts(), "no worker is ready"),
        (
            WorkerCounts(ready=1),
            WorkerCounts(ready=1, starting=1),
            DesiredCounts(2, 2),
            "1 of 2 prefill workers are ready; 1 of 2 decode workers are ready",
        ),
        (
            WorkerCounts(),
            WorkerCounts(ready=1, starting=1),
            DesiredCounts(),
            "1 of 2 decode workers are ready",
        ),
    ],
)
def test_a_role_with_fewer_ready_workers_than_asked_for_is_missing_some(
    prefill: WorkerCounts, decode: WorkerCounts, desired: DesiredCounts, expected: str
) -> None:
    assert missing_workers(FleetCounts(prefill, decode), desired) == expected
