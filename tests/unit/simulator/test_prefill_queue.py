"""Who gets which prompt, and when it is computed: as live prefill workers pull from JetStream."""

from dataclasses import replace

import pytest

from dynaplan.core.engine.timing import StepTiming
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.prefill_queue import SimulatedPrefillQueue
from dynaplan.simulator.run import StaticPolicy, simulate
from dynaplan.simulator.service import REFILL_S, SimulatedService
from tests.unit.simulator.services import ENGINE, at_once, every, service, workers

STEP_MS = 100.0
FIXED = StepTiming(lambda tokens: STEP_MS, lambda decodes, kv_tokens: 1.0)
SETTINGS = replace(
    service(is_disaggregated=True), engines=dict.fromkeys((Role.PREFILL, Role.DECODE), (ENGINE, FIXED))
)


def test_a_step_computes_what_its_worker_holds_and_what_comes_meanwhile_waits_for_the_next():
    simulated = SimulatedService(SETTINGS, workers(1, 1))
    for each in at_once([(100, 1)] * 8):
        simulated.arrive(each)

    computed = []
    for step in range(1, 5):
        simulated.run_until(step * (STEP_MS / 1000 + REFILL_S))
        computed.append(8 - simulated.queue_depth)
    assert computed == [1, 4, 5, 8]


def test_a_worker_that_has_computed_all_it_held_is_idle_until_it_has_the_next():
    settings = replace(SETTINGS, concurrent_prefills=1)

    outcome = simulate(at_once([(100, 1)] * 3), settings, workers(1, 1), StaticPolicy()).outcome

    later_ms = STEP_MS + 1000 * REFILL_S
    assert outcome.queued_ms.total == pytest.approx(0 + later_ms + 2 * later_ms)


def test_whoever_has_asked_for_longest_gets_the_next_prompt():
    simulated = SimulatedService(SETTINGS, workers(2, 1))
    for _ in range(6):
        simulated.arrive(TracedRequest(0.0, 100, 1))

    assert [each.book.in_flight for each in simulated.pools.all(Role.PREFILL)] == [3, 3]


def test_nobody_holds_more_than_allowed_and_the_queue_counts_what_is_not_acknowledged():
    simulated = SimulatedService(SETTINGS, workers(1, 1))
    for _ in range(6):
        simulated.arrive(TracedRequest(0.0, 100, 1))

    [worker] = simulated.pools.all(Role.PREFILL)
    assert (worker.book.in_flight, simulated.queue_depth) == (4, 6)
    simulated.run_until(STEP_MS / 1000 + REFILL_S / 2)
    assert simulated.queue_depth == 6
    simulated.run_until(STEP_MS / 1000 + REFILL_S * 2)
    assert (worker.book.in_flight, simulated.queue_depth) == (4, 5)


def test_a_worker_that_leaves_gets_nothing_more():
    simulated = SimulatedService(SETTINGS, workers(2, 1))
    simulated.want(workers(1, 1))
    for _ in range(4):
        simulated.arrive(TracedRequest(0.0, 100, 1))

    assert [each.book.in_flight for each in simulated.pools.all(Role.PREFILL) if each.is_ready] == [4]


def test_without_workers_work_waits():
    queue = SimulatedPrefillQueue(4)
    queue.put("a")

    assert list(queue.assignments()) == []
    assert queue.depth == 1


def test_a_pool_under_half_its_load_lets_hardly_anybody_wait():
    result = simulate(every(0.15, 200, 100, 1), SETTINGS, workers(2, 1), StaticPolicy())

    assert result.outcome.queued_ms.percentile(95) == 0.0
