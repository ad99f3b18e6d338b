"""No change of the oracle's schedule meets the SLO for clearly less. At length: ``tests.bench oracle``."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.lab.simulate.oracle.oracle import Oracle, OracleOptions, find_oracle
from dynaplan.lab.simulate.oracle.schedule import SchedulePolicy
from dynaplan.lab.simulate.run import simulate
from dynaplan.simulation.service import ServiceSettings
from tests.unit.lab.simulate.oracle.changes import Entries, bursts, changed, cheaper
from tests.unit.simulation.services import service

LENGTH_S = 100.0
TRIES = 10
CLEARLY = 0.97
"""Changes are tried at whole seconds, where the oracle has windows of two: each edge may gain one."""

NARROW_BLOCKS = 150
"""KV blocks of a worker: room for ten of the twenty prefixes."""


def settings(router: str, *, is_disaggregated: bool, are_prefixes_shared: bool) -> ServiceSettings:
    found = service(is_disaggregated=is_disaggregated, gpus=6, startup_s=10.0, router=router)
    if not are_prefixes_shared:
        return found
    narrow = {
        role: (replace(engine, total_blocks=NARROW_BLOCKS), timing)
        for role, (engine, timing) in found.engines.items()
    }
    return replace(found, engines=narrow)


@cache
def oracle_of(seed: int, prefixes: int, router: str, *, is_disaggregated: bool) -> Oracle:
    trace = bursts(seed, prefixes=prefixes, length_s=LENGTH_S)
    here = settings(router, is_disaggregated=is_disaggregated, are_prefixes_shared=bool(prefixes))
    return find_oracle(lambda: trace, here, OracleOptions(effort=3))


@pytest.mark.parametrize(
    ("seed", "prefixes", "router", "is_disaggregated"),
    [(1, 0, "round-robin", True), (2, 20, "round-robin", True), (3, 20, "kv", False)],
    ids=["no prefixes", "prefixes, in turns", "prefixes, kv, aggregated"],
)
def test_no_random_change_meets_the_slo_for_clearly_less(
    seed: int, prefixes: int, router: str, is_disaggregated: bool
) -> None:
    trace = bursts(seed, prefixes=prefixes, length_s=LENGTH_S)
    here = settings(router, is_disaggregated=is_disaggregated, are_prefixes_shared=bool(prefixes))
    oracle = oracle_of(seed, prefixes, router, is_disaggregated=is_disaggregated)
    found = [result.gpu_hours for _, result in cheaper(oracle, lambda: trace, here, TRIES, seed)]
    assert oracle.verdict.is_slo_met
    assert min(found, default=oracle.result.gpu_hours) >= CLEARLY * oracle.result.gpu_hours


def by_hand(seed: int) -> Entries:
    """Two prefill workers while the trace is at 6 requests a second, from a start-up earlier on; else one."""
    trace = bursts(seed, prefixes=20, length_s=LENGTH_S)
    entries = {0.0: Targets(2, 1)}
    for second in range(1, int(LENGTH_S)):
        ahead = sum(second - 5 <= each.arrival_s < second + 15 for each in trace)
        entries[float(second)] = Targets(2 if ahead > 50 else 1, 1)
    return tuple(entries.items())


def test_a_schedule_made_by_hand_is_not_cheaper_with_shared_prefixes() -> None:
    trace = bursts(2, prefixes=20, length_s=LENGTH_S)
    here = settings("round-robin", is_disaggregated=True, are_prefixes_shared=True)
    oracle = oracle_of(2, 20, "round-robin", is_disaggregated=True)
    result = simulate(trace, here, Targets(2, 1), SchedulePolicy("by hand", by_hand(2)))
    met = result.outcome.attainment(result.outcome.ttft_met)
    assert met < 0.95 or result.gpu_hours >= CLEARLY * oracle.result.gpu_hours


def test_changes_are_schedules_from_the_beginning_with_a_worker_of_each_role() -> None:
    entries: Entries = ((0.0, Targets(2, 1)), (30.0, Targets(1, 2)), (60.0, Targets(3, 1)))
    for seed in range(200):
        made = changed(entries, Random(seed), LENGTH_S)
        assert made[0][0] == 0.0
        assert sorted(made) == list(made)
        assert all(wanted.prefill >= 1 and wanted.decode >= 1 for _, wanted in made)
