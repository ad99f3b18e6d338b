from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState
from tests.unit.planner.sizing.queueing.test_decode_model import DEMAND, KIND


def test_a_pool_at_the_edge_of_its_capacity_has_a_percentile_beyond_every_time() -> None:
    service, workers = ServiceModel(KIND, KIND), Targets(1, 1000)
    used = SteadyState(service, DEMAND).prefill_waiting(1).utilisation
    edge = replace(DEMAND, requests_per_s=DEMAND.requests_per_s / used * (1 - 1e-9))
    prediction = SteadyState(service, edge).predict(workers, SlaTargets())
    assert not prediction.overload
    assert prediction.ttft_ms == math.inf


def test_decode_workers_that_are_overloaded_are_late_however_many_prefill_workers_there_are() -> None:
    state = SteadyState(ServiceModel(KIND, KIND), replace(DEMAND, requests_per_s=200.0))
    assert state.decode_batch(1).overload
    assert state.chance_of_ttft_over(1e9, Targets(1000, 1)) == 1.0
    assert state.chance_of_ttft_over(1e9, Targets(1000, 1000)) < 1.0
