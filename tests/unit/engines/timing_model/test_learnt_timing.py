"""The regression of an engine's step on spans that are made up: the engine's truth is known here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator

import pytest

from dynaplan.engines.timing_model.learnt_timing import (
    KNOWN_FACTOR,
    MIN_EQUATIONS,
    LearntTiming,
    StepCounts,
    StepLearner,
    StepLine,
    describe,
    solve_linear,
)
from dynaplan.engines.timing_model.step_timing import FITTED

TRUTH = StepLine(6.4, 0.012, 4.1e-5, 0.017, 2.0)

DecodeMs = Callable[[float, float], float]


def seconds(number: int, decode_ms: DecodeMs, batches: tuple[int, int] = (1, 24)) -> Iterator[StepCounts]:
    """Busy seconds of an engine that decodes so, computes prompts as ``TRUTH``, and jitters by 3 %."""
    draw = random.Random(7)
    for _ in range(number):
        batch, context = draw.randint(*batches), draw.uniform(300, 2000)
        prompts, tokens = draw.randint(0, 6), draw.uniform(100, 1500)
        prompts_ms = prompts * (TRUTH.prompt_ms + tokens * TRUTH.prompt_token_ms)
        steps = max(1, round((1000 - prompts_ms) / decode_ms(batch, batch * context)))
        busy_ms = (steps * decode_ms(batch, batch * context) + prompts_ms) * draw.uniform(0.97, 1.03)
        yield StepCounts(busy_ms, steps, steps * batch, steps * batch * context, prompts * tokens, prompts)


def learnt(number: int, decode_ms: DecodeMs = TRUTH.decode_ms, factor: float = 1.0) -> StepLearner:
    learner = StepLearner(StepLine(*(factor * value for value in TRUTH.coefficients)))
    for each in seconds(number, decode_ms):
        learner.learn(each)
    return learner


def test_each_prompt_of_a_step_pays_for_its_beginning_and_the_step_once() -> None:
    timing = LearntTiming(TRUTH, TRUTH).timing()
    alone_ms = timing.step_ms(0, 0.0, [(0, 1000)], 1)
    together_ms = timing.step_ms(0, 0.0, [(0, 1000), (0, 1000)], 2)
    assert together_ms - alone_ms == pytest.approx(TRUTH.prompt_ms + 1000 * TRUTH.prompt_token_ms)


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.4, 3.0])
def test_a_minute_teaches_the_step_whatever_was_thought_before(factor: float) -> None:
    known = learnt(60, factor=factor).known
    assert known.error < 0.1
    for batch in (1, 4, 16, 30):
        kv_tokens = batch * 1000.0
        assert known.decode_ms(batch, kv_tokens) == pytest.approx(TRUTH.decode_ms(batch, kv_tokens), rel=0.1)
    prompt_ms = TRUTH.step_ms + TRUTH.prompt_ms + 1000 * TRUTH.prompt_token_ms
    assert known.timing().prefill_ms(1000) == pytest.approx(prompt_ms, rel=0.15)


def test_nothing_is_promised_of_an_engine_that_was_hardly_seen() -> None:
    learner = learnt(MIN_EQUATIONS - 1)
    assert not learner.known.is_usable
    assert "error not known" in describe(learner.known)
    assert "nothing learnt" in describe(LearntTiming(TRUTH, TRUTH))


def test_the_error_is_that_of_seconds_that_were_not_seen() -> None:
    learner = learnt(200)
    assert learner.known.error < 0.05
    for each in seconds(20, lambda batch, kv_tokens: 3 * TRUTH.decode_ms(batch, kv_tokens)):
        learner.learn(each)
    assert learner.known.error > 0.1


@pytest.mark.parametrize("slowed", [(1.0, 1.0, 1.0, 2.5), (0.7, 1.0, 1.3), (0.8, 1.2)])
def test_seconds_that_scatter_are_learnt_in_the_mean_and_do_not_make_it_wrong(slowed: tuple[float]) -> None:
    draw, learner = random.Random(11), learnt(0)
    for _ in range(300):
        steps = round(160 / draw.choice(slowed))
        learner.learn(StepCounts(1000.0, steps, 4 * steps, 4000 * steps, 0, 0))
    mean_ms = 1000 / (160 * sum(1 / each for each in slowed) / len(slowed))
    assert learner.known.is_usable
    assert learner.known.decode_ms(4, 4000) == pytest.approx(mean_ms, rel=0.05)


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 3.0])
def test_a_wrong_step_that_was_thought_right_is_refused_until_it_is_learnt(factor: float) -> None:
    wrong = StepLine(*(factor * value for value in TRUTH.coefficients))
    learner, refused = StepLearner(wrong), 0
    learner.begin_with(LearntTiming(wrong, wrong, error=0.04, equations=1000, largest_batch=24))
    assert learner.known.is_usable
    for each in seconds(60, TRUTH.decode_ms):
        learner.learn(each)
        is_wrong = abs(learner.known.decode_ms(8, 8000) / TRUTH.decode_ms(8, 8000) - 1) > 0.15
        assert not (is_wrong and learner.known.is_usable)
        refused += not learner.known.is_usable
    assert refused < 30


def test_too_slow_for_small_batches_and_too_fast_for_large_ones_is_wrong_about_both() -> None:
    """Here the mean over all seconds is right throughout."""
    wrong = StepLine(10.0, 0.0, 0.0, 0.0, 0.0)
    learner = StepLearner(wrong)
    learner.begin_with(LearntTiming(wrong, wrong, error=0.04, equations=1000, largest_batch=16))
    for _ in range(15):
        learner.learn(StepCounts(700.0, 100, 100, 0, 0, 0))
        learner.learn(StepCounts(1300.0, 100, 1600, 0, 0, 0))
    assert not learner.known.is_usable


def test_an_engine_that_became_slower_is_learnt_anew() -> None:
    learner = learnt(200)
    for each in seconds(600, lambda batch, kv_tokens: 2 * TRUTH.decode_ms(batch, kv_tokens)):
        learner.learn(each)
    assert learner.known.decode_ms(8, 8000) == pytest.approx(2 * TRUTH.decode_ms(8, 8000), rel=0.1)


def test_a_step_that_jumps_with_the_batch_is_learnt_as_a_curve() -> None:
    def padded_ms(batch: float, kv_tokens: float) -> float:
        return 6.0 + 0.5 * 2 ** math.ceil(math.log2(max(1.0, batch))) + 4e-5 * kv_tokens

    known = learnt(600, padded_ms).known
    assert known.curve
    assert known.error < 0.12
    assert known.decode_ms(20, 20_000) == pytest.approx(padded_ms(20, 20_000), rel=0.12)


def test_beyond_the_batches_that_were_seen_the_worse_side_counts() -> None:
    known = learnt(300).known
    edge = known.known_batch
    assert edge == pytest.approx(KNOWN_FACTOR * known.largest_batch)
    inside = known.decode_ms(edge, 0.0) - known.decode_ms(edge - 1, 0.0)
    outside = known.decode_ms(edge + 1, 0.0) - known.decode_ms(edge, 0.0)
    assert outside > 1.2 * inside


def test_seconds_with_an_unseen_pause_hardly_move_what_is_known() -> None:
    learner = learnt(200)
    for number, each in enumerate(seconds(100, TRUTH.decode_ms)):
        pause = 5.0 if number % 10 == 0 else 1.0
        learner.learn(StepCounts(each.busy_ms * pause, *each.features))
    assert learner.known.decode_ms(8, 8000) == pytest.approx(TRUTH.decode_ms(8, 8000), rel=0.15)


def test_no_coefficient_is_negative() -> None:
    learner = StepLearner(TRUTH)
    for batch in range(1, 60):  # larger batches that are quicker, which no line with positive slopes fits
        learner.learn(StepCounts(1000.0 / batch, 100, 100 * batch, 100 * batch * 500, 0, 0))
        assert min(learner.known.line.coefficients) >= 0


def test_a_profile_gives_way_only_when_it_foretells_clearly_worse() -> None:
    fitted = FITTED["h100-bf16"]
    line = StepLine.through(fitted.timing(), fitted.max_kv_tokens)
    for slowness, gives_way in ((1.0, False), (1.5, True)):
        learner = StepLearner(line, fitted.timing(), spread=0.5)
        for each in seconds(200, lambda batch, kv, by=slowness: by * fitted.timing().decode_ms(batch, kv)):
            learner.learn(each)
        assert learner.known.beats_its_prior is gives_way


def test_what_was_learnt_is_written_and_read() -> None:
    known = learnt(100).known
    again = LearntTiming.from_json(json.loads(json.dumps(known.to_json())))
    assert again.line.coefficients == pytest.approx(known.line.coefficients, rel=1e-4)
    assert again.equations == known.equations
    assert len(json.dumps(known.to_json())) < 600


@pytest.mark.parametrize("line", [[1.0, 2.0], [-1.0, 0.0, 0.0, 0.0, 0.0], [float("nan"), 0.0, 0.0, 0.0, 0.0]])
def test_what_is_no_learnt_timing_is_refused(line: list[float]) -> None:
    document = {**learnt(30).known.to_json(), "line": line}
    with pytest.raises((TypeError, ValueError)):
        LearntTiming.from_json(document)


@pytest.mark.parametrize(
    "wrong",
    [
        {"equations": "100"},
        {"steps": None},
        {"request_slots": -1},
        {"prior_error": float("nan")},
        {"curve": [[1, 1], [8, -3]]},
        {"curve": [[4, 1], [4, 2]]},
        {"unknown": 1},
    ],
)
def test_a_number_that_no_learner_writes_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        LearntTiming.from_json({**learnt(30).known.to_json(), **wrong})


def test_a_new_life_goes_on_from_the_last_one() -> None:
    before = learnt(200).known
    learner = StepLearner(StepLine(100.0, 10.0, 1.0, 1.0, 1.0))
    learner.begin_with(before)
    assert learner.known.is_usable
    assert learner.known.decode_ms(4, 4000) == pytest.approx(before.decode_ms(4, 4000))
    for each in seconds(5, TRUTH.decode_ms):
        learner.learn(each)
    assert learner.known.decode_ms(4, 4000) == pytest.approx(before.decode_ms(4, 4000), rel=0.1)


def test_a_linear_system_of_very_different_scales_is_solved() -> None:
    assert solve_linear([[4.0, 1e-5, 4.0 + 2e-5], [1e-5, 1e-9, 1e-5 + 2e-9]]) == pytest.approx([1.0, 2.0])
