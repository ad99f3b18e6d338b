"""The fleet's own samples of ``/metrics/all``."""

from __future__ import annotations

from dynaplan.fleet.desired_counts import DesiredCounts
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.gateway.reporting.all_metrics import desired_samples, fleet_samples
from tests.unit.fleet.rules.test_statefile import FIRST, new_document


def test_each_worker_has_its_state_its_restarts_and_its_gpus() -> None:
    samples = list(fleet_samples(with_fleet(new_document(), [FIRST])))
    assert [(name, value) for name, _, _, value in samples] == [
        ("dynaplan_worker_state", 1.0),
        ("dynaplan_worker_recent_restarts", 0.0),
        ("dynaplan_gpu_held", 1.0),
    ]
    assert samples[0][2] | {"state": "ready", "worker": FIRST.name} == samples[0][2]
    assert samples[2][2] == {"gpu": "0", "worker": FIRST.name}


def test_counts_that_are_not_set_are_left_out() -> None:
    assert [(labels, value) for _, _, labels, value in desired_samples(DesiredCounts(-1, 3))] == [
        ({"role": "decode"}, 3.0)
    ]
