"""The estimate of how far an answer is that comes whole."""

from __future__ import annotations

from random import Random

import pytest

from dynaplan.gateway.prefill.answer_pace import AnswerPace

BLOCK_S, TOKEN_S = 0.005, 0.02


def learnt(count: int = 200, *, noise: float = 0.0) -> AnswerPace:
    """Answers of 50 to 150 tokens behind prompts of 0 to 200 blocks."""
    pace, dice = AnswerPace(), Random(1)
    for _ in range(count):
        blocks, tokens = dice.randrange(200), dice.randrange(50, 151)
        seconds = BLOCK_S * blocks + TOKEN_S * tokens
        pace.ended(blocks, tokens, seconds * (1 + noise * (dice.random() - 0.5)))
    return pace


def test_before_any_answer_nothing_is_known() -> None:
    pace = AnswerPace()
    pace.ended(10, 0, 3.0)
    assert pace.tokens_after(10, 5.0) == 0


def test_the_time_of_the_prompt_is_told_from_the_time_of_the_tokens() -> None:
    pace = learnt()
    assert pace.tokens_after(100, 100 * BLOCK_S - 0.01) == 0
    assert pace.tokens_after(100, 100 * BLOCK_S + 30.5 * TOKEN_S) == 30
    assert pace.tokens_after(0, 30.5 * TOKEN_S) == 30


def test_waits_of_chance_do_not_mislead_it_by_much() -> None:
    assert learnt(noise=0.4).tokens_after(100, 100 * BLOCK_S + 50 * TOKEN_S) == pytest.approx(50, abs=10)


def test_an_answer_is_not_taken_to_be_longer_than_they_are_on_average() -> None:
    assert learnt().tokens_after(0, 1e6) == pytest.approx(100, abs=10)


def test_of_answers_that_are_alike_all_time_is_taken_for_decoding() -> None:
    pace = AnswerPace()
    for _ in range(5):
        pace.ended(100, 50, 2.0)
    assert pace.tokens_after(100, 1.02) == 25


def test_where_prompts_seem_to_cost_less_than_nothing_all_time_is_taken_for_decoding() -> None:
    pace = AnswerPace()
    pace.ended(0, 10, 2.0)
    pace.ended(10, 10, 1.0)
    assert pace.tokens_after(0, 0.76) == 5


def test_answers_that_took_no_time_say_nothing() -> None:
    pace = AnswerPace()
    pace.ended(1, 10, 0.0)
    assert pace.tokens_after(0, 5.0) == 0
