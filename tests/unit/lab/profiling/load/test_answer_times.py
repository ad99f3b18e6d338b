"""What is read from answers that were computed at the same time."""

from __future__ import annotations

import pytest

from dynaplan.lab.profiling.load.answer_times import alone_ttft_ms, are_side_by_side, decoded_together
from dynaplan.lab.profiling.load.completions import Answer


def answer(first_s: float, itl_s: float, tokens: int, *, sent_s: float = 0.0, per_event: int = 1) -> Answer:
    """One whose tokens come at an even pace, so many of them in one event."""
    times_s = tuple(first_s + itl_s * number for number in range(0, tokens, per_event))
    return Answer(sent_s, times_s, prompt_tokens=10, output_tokens=tokens)


def test_one_request_alone_has_the_itl_of_its_tokens() -> None:
    together = decoded_together([answer(1.0, 0.02, 200)])
    assert together is not None
    assert together.itl_ms == pytest.approx(20.0)
    assert together.output_tokens_per_s == pytest.approx(50.0)


def test_what_the_first_ones_did_before_the_last_one_began_does_not_count() -> None:
    # The first one gets a token in 5 ms while it is alone, in 20 ms when the other decodes beside it.
    early = tuple(0.005 * number for number in range(100))
    late = tuple(0.5 + 0.02 * number for number in range(100))
    first = Answer(0.0, (*early, *late), 10, 200)
    together = decoded_together([first, answer(0.5, 0.02, 200)])
    assert together is not None
    assert together.itl_ms == pytest.approx(20.0, rel=0.01)
    assert together.output_tokens_per_s == pytest.approx(100.0, rel=0.01)


def test_what_the_last_ones_do_after_the_first_one_has_ended_does_not_count() -> None:
    times_s = (*(0.02 * number for number in range(100)), *(2.0 + 0.005 * number for number in range(100)))
    together = decoded_together([Answer(0.0, times_s, 10, 200), answer(0.0, 0.02, 100)])
    assert together is not None
    assert together.itl_ms == pytest.approx(20.0, rel=0.01)


def test_a_delay_right_after_the_last_prompt_does_not_count() -> None:
    times_s = (0.0, 0.1, *(0.1 + 0.02 * number for number in range(1, 200)))
    together = decoded_together([Answer(0.0, times_s, 10, len(times_s))])
    assert together is not None
    assert together.itl_ms == pytest.approx(20.0, rel=0.01)


def test_events_with_several_tokens_count_as_so_many() -> None:
    together = decoded_together([answer(0.0, 0.01, 400, per_event=4)])
    assert together is not None
    assert together.itl_ms == pytest.approx(10.0, rel=0.01)


def test_requests_that_never_decoded_all_at_once_say_nothing() -> None:
    answers = [answer(0.0, 0.01, 100), answer(2.0, 0.01, 100)]
    assert not are_side_by_side(answers)
    assert decoded_together(answers) is None


def test_an_answer_of_one_token_says_nothing() -> None:
    assert decoded_together([answer(0.0, 0.01, 1)]) is None


def test_the_ttft_of_lone_requests_is_the_least() -> None:
    answers = [answer(sent_s + ttft_s, 0.01, 5, sent_s=sent_s) for sent_s, ttft_s in ((0, 0.4), (1, 0.3))]
    assert alone_ttft_ms(answers) == pytest.approx(300.0)


def test_one_that_is_alone_counts_from_its_second_token_on_however_they_arrive() -> None:
    """A client that was not scheduled gets tokens in clumps: what is cut off at the ends may be all."""
    times_s = (0.0, *[0.02] * 90, *[0.06] * 109)
    together = decoded_together([Answer(0.0, times_s, 10, len(times_s))])
    assert together is not None
    assert together.itl_ms == pytest.approx(40.0 / 198)
