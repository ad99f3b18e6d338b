"""Who gets which prompt, and when it is computed: as live prefill workers pull from JetStream."""

from dataclasses import replace

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.events.dispatch_order import DispatchRule
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.pools import SimulatedWorker
from dynaplan.simulation.prefill_queue import QueuedPrompt, SimulatedPrefillQueue
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.run import StaticPolicy, simulate
from dynaplan.simulation.simulated_service import REFILL_S, ServiceSettings, SimulatedService
from tests.unit.simulation.services import ENGINE, at_once, every, service, workers

STEP_MS = 100.0
FIXED = StepTiming(lambda tokens: STEP_MS, lambda decodes, kv_tokens: 1.0)
SETTINGS = replace(
    service(is_disaggregated=True), engines=dict.fromkeys((Role.PREFILL, Role.DECODE), (ENGINE, FIXED))
)


Queue = SimulatedPrefillQueue[QueuedPrompt]


def given_out(queue: Queue, now_s: float = 0.0) -> list[tuple[SimulatedWorker, str]]:
    """All that can be given now, by the keys of the prompts."""
    return [(worker, prompt.key) for worker, prompt in iter(lambda: queue.assign(now_s), None)]


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


def test_what_is_given_up_leaves_the_queue_wherever_it_waits_and_what_is_taken_is_computed_in_vain():
    [worker] = SimulatedService(SETTINGS, workers(1, 1)).pools.serving(Role.PREFILL)
    queue: Queue = SimulatedPrefillQueue(1, DispatchRule(late_wait_s=15.0))
    queue.ask(worker)
    late, taken = QueuedPrompt("late", 0.0, 5.0), QueuedPrompt("taken", 9.0, 99.0)
    waiting, in_its_lane = QueuedPrompt("waiting", 9.0, 99.0), QueuedPrompt("in its lane")
    for each in (late, taken, waiting):
        queue.put(each)
    assert given_out(queue, 10.0) == [(worker, "taken")]
    queue.direct(in_its_lane, worker)
    assert queue.depth == 4
    for each in (late, waiting, in_its_lane, taken):
        queue.give_up(each)
    assert queue.depth == 1
    assert queue.computed("taken", 11.0) is taken
    assert taken.is_given_up
    assert queue.acknowledge(taken) is worker
    assert queue.depth == 0


def test_a_worker_that_leaves_gets_nothing_more():
    simulated = SimulatedService(SETTINGS, workers(2, 1))
    simulated.scale(workers(1, 1))
    for _ in range(4):
        simulated.arrive(TracedRequest(0.0, 100, 1))

    assert [each.book.in_flight for each in simulated.pools.all(Role.PREFILL) if each.is_ready] == [4]


def test_without_workers_work_waits():
    queue: Queue = SimulatedPrefillQueue(4)
    queue.put(QueuedPrompt("a"))

    assert given_out(queue) == []
    assert queue.depth == 1


def test_a_pool_under_half_its_load_lets_hardly_anybody_wait():
    result = simulate(every(0.15, 200, 100, 1), SETTINGS, workers(2, 1), StaticPolicy())

    assert result.outcome.queued_ms.percentile(95) == 0.0


DIRECTED = replace(SETTINGS, routing=SimulatedRouting("kv"))


def prompt(at_s: float, first: int) -> TracedRequest:
    """A prompt whose six blocks have ids from ``first`` on."""
    return TracedRequest(at_s, 100, 1, tuple(range(first, first + 6)), 16)


def test_a_prompt_is_directed_to_the_prefill_worker_that_has_it_cached():
    simulated = SimulatedService(DIRECTED, workers(2, 1))
    held = []
    for at_s, first in ((0.0, 0), (1.0, 100), (2.0, 0), (3.0, 0), (4.0, 100), (5.0, 100)):
        simulated.run_until(at_s)
        simulated.arrive(prompt(at_s, first))
        held.append([each.book.in_flight for each in simulated.pools.all(Role.PREFILL)])
    simulated.run_out()

    assert held[2] == held[3] == held[0]
    assert held[4] == held[5] == held[1] == held[0][::-1]
    assert simulated.outcome.cached_tokens == 4 * 96
    shared = replace(DIRECTED, routing=SimulatedRouting())
    trace = [prompt(at_s, 100 * (int(at_s) % 3)) for at_s in range(12)]
    assert (
        simulate(trace, DIRECTED, workers(2, 1), StaticPolicy()).outcome.cached_tokens
        > simulate(trace, shared, workers(2, 1), StaticPolicy()).outcome.cached_tokens
    )


def test_directed_prompts_wait_for_nobody_and_no_more_than_allowed_are_held():
    simulated = SimulatedService(SETTINGS, workers(2, 1))
    worker, other = simulated.pools.serving(Role.PREFILL)
    queue: Queue = SimulatedPrefillQueue(2)
    for each in (worker, other):
        queue.ask(each)
    prompts = {key: QueuedPrompt(key) for key in "abcd"}
    for key in "abc":
        queue.direct(prompts[key], worker)
    queue.put(prompts["d"])

    assert [(each.number, key) for each, key in given_out(queue)] == [
        *((worker.number, key) for key in "ab"),
        (other.number, "d"),
    ]
    assert queue.depth == 4
    queue.acknowledge(prompts["a"])
    assert [key for _, key in given_out(queue)] == ["c"]
    assert queue.depth == 3


def test_prompts_directed_to_a_worker_that_leaves_go_to_the_others():
    simulated = SimulatedService(SETTINGS, workers(2, 1))
    both = simulated.pools.serving(Role.PREFILL)
    simulated.scale(workers(1, 1))
    other, leaving = sorted(both, key=lambda each: not each.is_ready)
    assert not leaving.is_ready
    queue: Queue = SimulatedPrefillQueue(2)
    queue.ask(other)
    queue.direct(QueuedPrompt("a"), leaving)

    assert [(each.number, key) for each, key in given_out(queue)] == [(other.number, "a")]


def dispatched(late_wait_s: float = 15.0) -> ServiceSettings:
    """The service, with a deadline of 500 ms for the first token."""
    by_deadline = replace(SETTINGS.disaggregation, prefill_deadline_ms=500.0, prefill_late_wait_s=late_wait_s)
    return replace(SETTINGS, disaggregation=by_deadline, concurrent_prefills=1)


def test_a_prompt_that_can_no_longer_meet_its_target_goes_behind_those_that_can() -> None:
    overload = every(0.05, 200, 100, 1)
    in_order = simulate(
        overload, replace(dispatched(), disaggregation=SETTINGS.disaggregation), workers(1, 1), StaticPolicy()
    ).outcome
    by_deadline = simulate(overload, dispatched(), workers(1, 1), StaticPolicy()).outcome

    assert in_order.ttft_met < 20
    assert by_deadline.ttft_met > 90  # of some 100 that one worker computes in this time
    assert in_order.requests == by_deadline.requests == 200


def test_where_prompts_are_computed_as_fast_as_they_come_the_order_is_that_of_arrival() -> None:
    calm = every(0.2, 100, 100, 1)
    in_order = simulate(
        calm, replace(dispatched(), disaggregation=SETTINGS.disaggregation), workers(1, 1), StaticPolicy()
    ).outcome

    outcome = simulate(calm, dispatched(), workers(1, 1), StaticPolicy()).outcome

    assert outcome.ttft_ms.total == in_order.ttft_ms.total


def taken(queue: Queue, worker: SimulatedWorker, now_s: float, took_s: float) -> str:
    """The key of the next prompt of a worker that computes one at a time, and computes it in that time."""
    queue.ask(worker)
    [(_, key)] = given_out(queue, now_s)
    queue.acknowledge(queue.computed(key, now_s + took_s))
    return key


def test_a_late_prompt_is_passed_over_by_no_more_than_one_for_each_once_it_waits_twice_as_long() -> None:
    [worker] = SimulatedService(SETTINGS, workers(1, 1)).pools.serving(Role.PREFILL)
    queue: Queue = SimulatedPrefillQueue(1, DispatchRule(late_wait_s=1.0))
    for number in range(40):
        queue.put(QueuedPrompt(f"{number}", number * 0.1, number * 0.1 + 0.5))

    order: list[int] = []
    now_s = 3.0
    while queue.depth:
        order.append(int(taken(queue, worker, now_s, 0.05)))
        now_s += 0.25

    # At 3.0 s those up to 24 are late, and 0 to 4 have been for 2 s; from 4.4 s on all are late.
    assert sorted(order) == list(range(40))
    assert [number < 25 for number in order[:4]] == [False, True, False, True]
    assert order[1:4:2] == [0, 1]
    assert order[6:] == sorted(order[6:])


def test_a_late_prompt_is_seldom_taken_when_it_is_just_owed() -> None:
    [worker] = SimulatedService(SETTINGS, workers(1, 1)).pools.serving(Role.PREFILL)
    queue: Queue = SimulatedPrefillQueue(1, DispatchRule(late_wait_s=4.0))
    for number in range(8):
        queue.put(QueuedPrompt(f"late {number}", -1.5, -1.0))
    for number in range(16):
        queue.put(QueuedPrompt(f"in time {number}", 4.0, 9.0))

    keys = [taken(queue, worker, 4.0, 0.01) for _ in range(16)]  # 5 s after the deadline: every eighth
    assert [index for index, key in enumerate(keys) if key.startswith("late")] == [7, 15]


def test_the_depth_counts_late_prompts_too() -> None:
    [worker] = SimulatedService(SETTINGS, workers(1, 1)).pools.serving(Role.PREFILL)
    queue: Queue = SimulatedPrefillQueue(1, DispatchRule(late_wait_s=2.0))
    for key in "abc":
        queue.put(QueuedPrompt(key, 0.5, 1.0))

    assert taken(queue, worker, 5.0, 0.1) == "a"
    assert queue.depth == 2
