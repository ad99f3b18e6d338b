"""HPA and KPA behave as their documentation says, so that a comparison with them means something."""

import pytest

from dynaplan.contract.counts import PoolSizes, Sample
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.simulated_service import SimulatedService
from tests.bench.autoscalers import HpaPolicy, KpaPolicy, fit_gpus
from tests.unit.simulation.services import service, workers


class Told(SimulatedService):
    """A service whose KV usage is what the test says."""

    usage = 0.0

    def sample(self) -> Sample:
        return Sample(self.now_s, kv_usage=self.usage, decode_workers=1)


def told(decode: int, gpus: int = 16) -> Told:
    return Told(service(gpus=gpus, startup_s=0.0), workers(0, decode))


def evaluate(policy: HpaPolicy | KpaPolicy, simulated: SimulatedService, at_s: float) -> int:
    simulated.run_until(at_s)
    policy.evaluate(simulated)
    return simulated.pools.wanted.decode


@pytest.mark.parametrize(
    ("usage", "wanted"), [(0.5, 2), (0.54, 2), (0.46, 2), (0.6, 3), (1.0, 4)], ids=lambda value: str(value)
)
def test_hpa_wants_workers_times_metric_over_target_outside_its_tolerance(usage, wanted):
    simulated = told(2)
    simulated.usage = usage

    assert evaluate(HpaPolicy({Role.DECODE: 0.5}), simulated, 15.0) == wanted


def test_hpa_adds_no_more_than_four_workers_or_as_many_as_there_are_at_once():
    simulated = told(2)
    simulated.usage = 50.0

    assert evaluate(HpaPolicy({Role.DECODE: 0.5}), simulated, 15.0) == 6


def test_hpa_removes_workers_only_after_five_minutes_of_wanting_fewer():
    simulated, policy = told(4), HpaPolicy({Role.DECODE: 0.5})
    simulated.usage = 0.5
    evaluate(policy, simulated, 0.0)
    simulated.usage = 0.1

    assert [evaluate(policy, simulated, 15.0 * tick) for tick in (1, 10, 20)] == [4, 4, 4]
    assert evaluate(policy, simulated, 316.0) == 1


def test_hpa_changes_nothing_without_a_metric():
    simulated = SimulatedService(service(startup_s=30.0), workers(0, 0))
    simulated.scale(workers(0, 2))

    assert evaluate(HpaPolicy({Role.DECODE: 0.5}), simulated, 15.0) == 2


def test_kpa_follows_the_requests_in_flight_and_panics_up_at_once():
    simulated, policy = told(1), KpaPolicy({Role.DECODE: 2.0})
    for _ in range(8):
        simulated.arrive(TracedRequest(0.0, 100, 2000))

    assert evaluate(policy, simulated, 2.0) == 4


def test_kpa_halves_its_workers_at_most_when_the_load_is_gone():
    assert evaluate(KpaPolicy({Role.DECODE: 2.0}), told(8), 2.0) == 4


def test_both_pools_give_way_when_together_they_want_more_gpus_than_there_are():
    simulated = SimulatedService(service(is_disaggregated=True, gpus=4), workers(1, 1))

    assert fit_gpus(simulated, {Role.PREFILL: 2, Role.DECODE: 5}) == PoolSizes(2, 2)


def test_a_rival_says_what_it_saw_and_when_the_gpus_did_not_suffice():
    simulated, policy = told(2, gpus=3), HpaPolicy({Role.DECODE: 0.5})
    simulated.usage = 1.0
    evaluate(policy, simulated, 15.0)

    assert policy.why == (
        "KV usage of the decode workers 1, its target 0.5; more were wanted than 3 GPUs can hold"
    )


def test_kpa_says_when_it_panics():
    simulated, policy = told(1), KpaPolicy({Role.DECODE: 2.0})
    for _ in range(8):
        simulated.arrive(TracedRequest(0.0, 100, 2000))
    evaluate(policy, simulated, 2.0)

    assert policy.why == "8 requests in decode over 6 s (8 over 60 s), its target 2 per worker, panicking"
