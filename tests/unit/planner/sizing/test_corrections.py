"""What engines are taken to be, from what was measured: steps are compared, never queues."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import AverageLoad, Corrections, Demand
from dynaplan.planner.sizing.corrections import GAIN, MAX_FACTOR, MIN_FACTOR, MIN_REQUESTS, update_corrections
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from tests.unit.planner.rules import targets as situations
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import H200, kind

DISAGGREGATED = QueueingModel(kind(H200), kind(H200))
AGGREGATED = QueueingModel(kind(H200))
PROMISE = SlaTargets(2000.0, 50.0)
ONE_EACH = PoolSizes(1, 1)
EXACT = Corrections()


def measured(requests_per_s: float, engines: QueueingModel, serving: PoolSizes = ONE_EACH) -> Traffic:
    """An interval as it is where engines are like that: the means that the model has for them."""
    traffic = situations.traffic(requests_per_s)
    assert traffic.isl
    assert traffic.osl
    assert traffic.requests
    times = SteadyState(engines, Demand(requests_per_s, traffic.isl, traffic.osl)).mean_times(serving)
    assert times
    part = traffic.requests / traffic.osl.total
    answered = replace(traffic.osl, counts=tuple(part * each for each in traffic.osl.counts))
    return replace(traffic, osl=answered, ttft_ms=times.mean_ttft_ms, itl_ms=times.mean_itl_ms)


def load_of(serving: PoolSizes) -> AverageLoad:
    """Those workers, beside a prefill queue whose depth nobody knows."""
    return AverageLoad(prefill_workers=serving.prefill, decode_workers=serving.decode)


def corrections_after(
    traffic: Traffic,
    before: Corrections = EXACT,
    service: QueueingModel = DISAGGREGATED,
    serving: PoolSizes = ONE_EACH,
) -> Corrections:
    return update_corrections(service, before, traffic, load_of(serving), PROMISE)[0]


def aimed_at(
    traffic: Traffic,
    before: Corrections = EXACT,
    service: QueueingModel = DISAGGREGATED,
    serving: PoolSizes = ONE_EACH,
) -> Corrections:
    """Where many such intervals would take the corrections; a decode factor is exact in ``before``."""
    after = corrections_after(traffic, before, service, serving)
    return Corrections(
        before.prefill * (after.prefill / before.prefill) ** (1 / GAIN),
        before.decode * (after.decode / before.decode) ** (1 / GAIN),
    )


@pytest.mark.parametrize("requests_per_s", [3.0, 8.0, 14.0])
def test_engines_as_their_profile_says_are_taken_to_be_so_whatever_their_load(
    requests_per_s: float,
) -> None:
    aim = aimed_at(measured(requests_per_s, DISAGGREGATED))
    assert astuple(aim) == pytest.approx((1.0, 1.0), abs=0.03)


@pytest.mark.parametrize("requests_per_s", [3.0, 6.0, 9.0])
def test_a_slow_engine_is_found_whatever_its_load(requests_per_s: float) -> None:
    slow = measured(requests_per_s, DISAGGREGATED.slowed(1.6, 1.4))
    assert aimed_at(slow).decode == pytest.approx(1.4, rel=0.05)
    assert aimed_at(slow, Corrections(1.0, 1.4)).prefill == pytest.approx(1.6, rel=0.05)


def test_a_fast_engine_is_found_where_hardly_anybody_waits() -> None:
    fast = measured(3.0, DISAGGREGATED.slowed(0.7, 0.7))
    assert aimed_at(fast).decode == pytest.approx(0.7, rel=0.05)
    assert 0.7 < aimed_at(fast, Corrections(1.0, 0.7)).prefill < 0.85


def test_a_pool_that_is_only_busy_is_not_taken_for_a_slow_one() -> None:
    """Several times as long as alone, and no longer than the model's waiting says: no evidence either way."""
    busy, alone = measured(15.0, DISAGGREGATED), measured(0.001, DISAGGREGATED)
    assert busy.ttft_ms
    assert alone.ttft_ms
    assert busy.ttft_ms > 2 * alone.ttft_ms
    for part in (0.2, 0.5, 0.8, 1.0):
        waits = replace(busy, ttft_ms=alone.ttft_ms + part * (busy.ttft_ms - alone.ttft_ms))
        assert aimed_at(waits).prefill == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("before", [0.95, 1.0, 1.3])
def test_a_factor_between_what_all_and_no_waiting_make_of_it_stays_exactly(before: float) -> None:
    waits = measured(15.0, DISAGGREGATED.slowed(0.9, 1.0))
    assert corrections_after(waits, Corrections(before, 1.0)).prefill == before


def test_a_factor_that_neither_explains_goes_to_the_nearer_one() -> None:
    slow = measured(3.0, DISAGGREGATED.slowed(1.6, 1.0))
    all_waiting, no_waiting = (aimed_at(slow, Corrections(each, 1.0)).prefill for each in (0.5, 3.0))
    assert all_waiting == pytest.approx(1.6, rel=0.03)
    assert all_waiting < no_waiting < 2.5


def test_a_factor_goes_a_fifth_of_the_way_in_one_interval() -> None:
    after = corrections_after(measured(3.0, DISAGGREGATED.slowed(1.6, 1.4)), Corrections(1.0, 1.0))
    assert GAIN == 0.2
    assert after.decode == pytest.approx(1.4**GAIN, rel=0.01)
    assert after.prefill == pytest.approx(1.6**GAIN, rel=0.02)


def test_no_factor_is_believed_beyond_the_bounds() -> None:
    hopeless = replace(measured(3.0, DISAGGREGATED), ttft_ms=PROMISE.ttft_ms, itl_ms=1e6)
    most = corrections_after(hopeless, Corrections(0.99 * MAX_FACTOR, 0.99 * MAX_FACTOR))
    assert astuple(most) == pytest.approx((MAX_FACTOR, MAX_FACTOR), rel=0.02)
    assert max(astuple(most)) <= MAX_FACTOR
    miraculous = replace(hopeless, ttft_ms=0.001, itl_ms=0.001)
    least = corrections_after(miraculous, Corrections(1.01 * MIN_FACTOR, 1.01 * MIN_FACTOR))
    assert astuple(least) == pytest.approx((MIN_FACTOR, MIN_FACTOR), rel=0.02)
    assert min(astuple(least)) >= MIN_FACTOR


def test_a_ttft_over_its_target_that_no_queue_explains_says_nothing_of_how_fast_prompts_are_computed() -> (
    None
):
    backlog = replace(measured(10.0, DISAGGREGATED), ttft_ms=PROMISE.ttft_ms + 1)
    after, why = update_corrections(DISAGGREGATED, Corrections(1.2, 1.0), backlog, load_of(ONE_EACH), PROMISE)
    assert after.prefill == 1.2
    assert "prefill stays: a TTFT of 2001 ms is not explained by the prefill queue" in why


def test_in_a_backlog_the_batch_follows_from_what_was_answered_and_not_from_what_arrived() -> None:
    """Twice as many arrived as were answered: the steps were as long as the batch that there was."""
    served = measured(8.0, DISAGGREGATED)
    assert served.requests
    backlog = replace(served, requests=2 * served.requests)
    assert aimed_at(backlog).decode == pytest.approx(aimed_at(served).decode)


@pytest.mark.parametrize(
    ("change", "serving", "why"),
    [
        ({"requests": MIN_REQUESTS - 1.0}, ONE_EACH, "there were too few requests"),
        ({"isl_tokens": None}, ONE_EACH, "there were too few requests"),
        ({"osl": None}, ONE_EACH, "there were too few requests"),
        ({"requests": None, "missing": "no frontend answered"}, ONE_EACH, "no frontend answered"),
        ({"requests": None}, ONE_EACH, "nothing was measured"),
        ({}, PoolSizes(0, 1), "not every role had workers"),
        ({}, PoolSizes(1, 0), "not every role had workers"),
    ],
)
def test_what_says_too_little_changes_nothing(
    change: dict[str, object], serving: PoolSizes, why: str
) -> None:
    before = Corrections(1.3, 0.8)
    slow = replace(measured(8.0, DISAGGREGATED.slowed(1.6, 1.4)), **change)  # type: ignore[arg-type]
    after, words = update_corrections(DISAGGREGATED, before, slow, load_of(serving), PROMISE)
    assert after == before
    assert words == f"corrections stay at prefill 1.3, decode 0.8: {why}"


def test_times_that_were_not_measured_change_only_what_they_do_not_tell() -> None:
    slow = measured(8.0, DISAGGREGATED.slowed(1.6, 1.4))
    without_itl, _ = update_corrections(
        DISAGGREGATED, Corrections(), replace(slow, itl_ms=None), load_of(ONE_EACH), PROMISE
    )
    assert without_itl.decode == 1.0 < without_itl.prefill
    without_ttft, _ = update_corrections(
        DISAGGREGATED, Corrections(), replace(slow, ttft_ms=None), load_of(ONE_EACH), PROMISE
    )
    assert without_ttft.prefill == 1.0 < without_ttft.decode


def test_slow_decoding_is_not_taken_for_slow_prefill() -> None:
    """A first token waits for decode steps too."""
    slow = measured(6.0, DISAGGREGATED.slowed(1.0, 2.0))
    assert aimed_at(slow).decode == pytest.approx(2.0, rel=0.05)
    assert aimed_at(slow, Corrections(1.0, 2.0)).prefill == pytest.approx(1.0, abs=0.03)


def test_aggregated_workers_have_one_factor_for_all_they_do() -> None:
    serving = PoolSizes(0, 2)
    slow = measured(6.0, AGGREGATED.slowed(1.0, 1.5), serving)
    aim = aimed_at(slow, Corrections(1.1, 1.0), AGGREGATED, serving)
    assert aim.prefill == 1.1
    assert aim.decode == pytest.approx(1.5, rel=0.1)


def test_arrivals_that_come_in_bursts_are_no_evidence_that_engines_are_slow() -> None:
    """Requests of a burst decode, and wait, beside more others than the mean rate says."""
    steady = measured(3.0, DISAGGREGATED)
    busy = replace(
        steady, ttft_ms=steady.ttft_ms and 3 * steady.ttft_ms, itl_ms=measured(9.0, DISAGGREGATED).itl_ms
    )
    even = replace(busy, arrivals=(3.0,) * 10)
    burst = replace(busy, arrivals=(0.0,) * 7 + (10.0,) * 3)

    assert aimed_at(even).decode > aimed_at(burst).decode >= 1.0
    assert aimed_at(even).prefill > aimed_at(burst).prefill >= 1.0
    assert aimed_at(replace(even, arrivals=(0.0,) * 10)) == aimed_at(busy)


def full_step_ms(service: QueueingModel, traffic: Traffic, answered_per_s: float) -> float:
    """A step of an aggregated worker that is full of prompts, at that rate of answers, by trying lengths."""
    assert traffic.isl and traffic.osl
    state = SteadyState(service, Demand(answered_per_s, traffic.isl, traffic.osl))
    decode, prompts, step_ms = service.decode, state.prompts, 10.0
    for _ in range(200):
        batch = min(1 + answered_per_s / 1000 * state.answers.mean_steps * step_ms, 256.0)
        tokens = decode.settings.batched_tokens - batch
        start_ms = max(0.0, prompts.fixed_ms - decode.decode_ms(1, 0.0))
        kv_tokens = min(batch * state.answers.context_tokens, decode.kv_tokens)
        step_ms = decode.decode_ms(batch, kv_tokens) + start_ms
        step_ms += tokens / prompts.mean_tokens * prompts.mean_ms
    return step_ms


def backlogged(service: QueueingModel, times: float) -> Traffic:
    """An interval in which prompts waited all the time at an aggregated worker, that many times as slow."""
    calm = measured(4.0, service, PoolSizes(0, 1))
    return replace(calm, ttft_ms=20_000.0, itl_ms=times * full_step_ms(service, calm, 4.0))


def test_steps_that_are_full_of_waiting_prompts_are_no_evidence_that_an_aggregated_worker_is_slow() -> None:
    backlog = backlogged(AGGREGATED, 1.0)
    for before in (1.0, 1.1):
        after = corrections_after(backlog, Corrections(1.0, before), AGGREGATED, PoolSizes(0, 1))
        assert after.decode == pytest.approx(before)
    in_time = replace(backlog, ttft_ms=PROMISE.ttft_ms)
    assert corrections_after(in_time, EXACT, AGGREGATED, PoolSizes(0, 1)).decode > 1.1


def test_an_aggregated_worker_that_is_slow_is_found_in_a_backlog_too() -> None:
    slow = backlogged(AGGREGATED, 2.0)
    aim = aimed_at(slow, EXACT, AGGREGATED, PoolSizes(0, 1))
    assert 1.5 < aim.decode < 2.5


def test_a_rise_is_no_evidence_that_an_aggregated_worker_is_slow() -> None:
    """Its steps hold the prompts that came, and few of their answers have ended."""
    serving = PoolSizes(0, 1)
    busy = measured(10.0, AGGREGATED, serving)
    assert busy.osl
    few = replace(busy.osl, counts=tuple(0.3 * each for each in busy.osl.counts))
    rise = replace(busy, osl=few)
    assert corrections_after(rise, EXACT, AGGREGATED, serving).decode == 1.0
    fallen = replace(rise, requests=0.3 * (busy.requests or 0))
    assert corrections_after(fallen, EXACT, AGGREGATED, serving).decode > 1.0
    slow = replace(rise, itl_ms=2 * (busy.itl_ms or 0))
    assert corrections_after(slow, EXACT, AGGREGATED, serving).decode > 1.0
