"""Requests that decode, as a fluid in stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.planner.bursts.fluid import Work, decoded, in_stages
from dynaplan.planner.bursts.memory import Decoding
from dynaplan.planner.sizing.queueing.queueing_model import SteadyState, measured_demand
from tests.unit.planner.rules.targets import model, traffic

ITL_MS = 20.0


def work_of(itl_ms: float = ITL_MS, osl: float = 150) -> Work:
    demand = measured_demand(traffic(10.0, 3000, osl))
    assert demand
    return Work(SteadyState(model().service, demand), SlaTargets(500.0, itl_ms))


WORK = work_of()
STEP_S = WORK.step_ms(1) / 1000


def pulled(
    arrivals: list[float], before: Decoding | None = None, work: Work = WORK
) -> tuple[Decoding, list[float]]:
    """What decodes after these pulls of 0.1 s on one worker, and what was known to miss in each."""
    decoding, missed = before or Decoding(), []
    for arrived in arrivals:
        decoding, long = decoded(decoding, arrived, 0.1, 1, work)
        missed.append(long)
    return decoding, missed


def test_answers_that_are_all_as_long_have_as_many_stages_as_there_may_be() -> None:
    assert WORK.stages == 8


def test_answers_end_after_their_length_and_until_then_their_number_rises() -> None:
    life_s = WORK.state.answers.mean_steps * STEP_S
    half = round(life_s / 2 / 0.1)
    decoding, _ = pulled([0.01] * half)
    assert decoding.total == pytest.approx(0.01 * half, rel=0.05)
    calm, _ = pulled([0.01] * 20 * half)
    assert calm.total == pytest.approx(0.1 * life_s, rel=0.05)


def test_an_answer_is_too_slow_by_the_mean_of_its_steps_and_that_is_known_when_it_ends() -> None:
    crowd = 1.5 * WORK.most_in_time
    _, missed = pulled([crowd] + [0.0] * 300)
    assert missed[0] < 0.01 * crowd
    assert sum(missed) > 0.5 * crowd
    _, fewer = pulled([0.5 * WORK.most_in_time] + [0.0] * 300)
    assert sum(fewer) < 0.01 * crowd


def test_what_finds_no_slot_is_counted_at_once_and_only_once() -> None:
    patient = work_of(itl_ms=1000.0)
    full, first = pulled([1.5 * WORK.most_at_once], work=patient)
    after, missed = pulled([100.0] + [0.0] * 400, full, patient)
    assert first[0] < 1
    assert missed[0] >= 100
    assert sum(missed) == pytest.approx(100.0, rel=0.01)
    assert after.total < 1
    assert 0 <= after.counted <= after.total


def test_a_prompt_prolongs_the_steps_of_an_aggregated_worker_as_the_queueing_model_says() -> None:
    state = WORK.state
    aggregated = replace(WORK, state=SteadyState(replace(state.service, prefill=None), state.demand))
    for requests_per_s in (2.0, 5.0, 10.0):
        balance = SteadyState(aggregated.state.service, replace(state.demand, requests_per_s=requests_per_s))
        alone = balance.decode_batch(1)
        ratio = aggregated.step_ms(1 + alone.batch, requests_per_s) / alone.step_ms
        assert 1 <= ratio < 1.03
    assert aggregated.step_ms(8, 1e6) < 100 * aggregated.step_ms(8)


def test_prompts_prolong_the_steps_of_those_workers_only_that_compute_them() -> None:
    aggregated = replace(
        WORK, state=SteadyState(replace(WORK.state.service, prefill=None), WORK.state.demand)
    )
    for work, slower in ((WORK, False), (aggregated, True)):
        few, many = (decoded(Decoding(), arrived, 1.0, 1, work)[0] for arrived in (0.1, 15.0))
        assert (many.step_ms[-1] > 1.5 * few.step_ms[-1]) is slower


def test_requests_are_as_far_on_in_other_stages() -> None:
    eight = Decoding(tuple(float(stage) for stage in range(8)), (10.0,) * 8, 4.0)
    two = in_stages(eight, 2)
    assert two == Decoding((6.0, 22.0), (10.0, 10.0), 4.0)
    back = in_stages(two, 8)
    assert back.total == eight.total
    assert (back.requests[0], back.requests[4]) == (6.0, 22.0)
    assert in_stages(eight, 8) is eight
    assert in_stages(Decoding((0.0, 0.0), (0.0, 0.0)), 1) == Decoding((0.0,), (0.0,))
