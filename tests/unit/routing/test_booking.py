"""A request counts at its worker from its booking until its close; whole answers grow by an estimate."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.routing.booking import AnswerPace, BookEntry, WorkerBook


def test_an_entry_counts_its_request_its_blocks_and_those_to_compute() -> None:
    book = WorkerBook()
    BookEntry(book, prompt_blocks=10, overlap_blocks=4)

    assert (book.in_flight, book.active_blocks, book.prefill_blocks) == (1, 10, 6)


def test_a_computed_prompt_is_no_prefill_work_and_stays_active() -> None:
    book = WorkerBook()
    entry = BookEntry(book, prompt_blocks=10)
    entry.finish_prefill()
    entry.finish_prefill()

    assert (book.in_flight, book.active_blocks, book.prefill_blocks) == (1, 10, 0)


def test_the_hit_rate_is_the_overlap_over_the_prompt_and_0_without_blocks() -> None:
    assert BookEntry(WorkerBook(), prompt_blocks=10, overlap_blocks=4).prefix_hit_rate == 0.4
    assert BookEntry(WorkerBook()).prefix_hit_rate == 0.0


def test_a_candidate_is_the_book_under_the_workers_id() -> None:
    book = WorkerBook()
    BookEntry(book, prompt_blocks=3)
    candidate = book.candidate(7, 2)

    assert (candidate.instance_id, candidate.in_flight, candidate.overlap_blocks) == (7, 1, 2)
    assert (candidate.active_blocks, candidate.prefill_blocks) == (3, 3)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20), st.randoms())
def test_when_every_entry_is_closed_the_book_is_empty(entries, random) -> None:
    book = WorkerBook()
    made = [(BookEntry(book, blocks, blocks // 2), is_prefilled) for blocks, is_prefilled in entries]
    random.shuffle(made)
    for entry, is_prefilled in made:
        if is_prefilled:
            entry.finish_prefill()
        entry.close()

    assert book == WorkerBook()


def test_an_answer_fills_blocks_while_it_is_decoded_and_close_gives_them_back() -> None:
    book = WorkerBook()
    entry = BookEntry(book, prompt_blocks=2, block_tokens=16, partial_block_tokens=6)
    assert entry.grows_at_tokens == 1

    entry.record_decoded(1)
    assert (book.active_blocks, entry.grows_at_tokens) == (3, 11)
    entry.record_decoded(10)
    assert book.active_blocks == 3
    entry.record_decoded(11)
    assert book.active_blocks == 4
    entry.record_decoded(60)
    assert (book.active_blocks, entry.grows_at_tokens) == (2 + 5, 5 * 16 - 6 + 1)
    entry.close()
    assert book == WorkerBook()


def test_an_answer_of_unknown_blocks_fills_none() -> None:
    book = WorkerBook()
    BookEntry(book).record_decoded(1000)
    assert book.active_blocks == 0


def test_what_other_routers_have_at_a_worker_counts_too() -> None:
    book = WorkerBook(1, 10, 4)
    candidate = book.candidate(7, 0, WorkerBook(2, 20, 5))
    assert (candidate.in_flight, candidate.active_blocks, candidate.prefill_blocks) == (3, 30, 9)
    assert book == WorkerBook(1, 10, 4)


BLOCK_S, TOKEN_S = 0.005, 0.02


def learnt(count: int = 200, *, noise: float = 0.0) -> AnswerPace:
    """Answers of 50 to 150 tokens behind prompts of 0 to 200 blocks."""
    pace, dice = AnswerPace(), Random(1)
    for _ in range(count):
        blocks, tokens = dice.randrange(200), dice.randrange(50, 151)
        seconds = BLOCK_S * blocks + TOKEN_S * tokens
        pace.observe(blocks, tokens, seconds * (1 + noise * (dice.random() - 0.5)))
    return pace


def test_before_any_answer_nothing_is_known() -> None:
    pace = AnswerPace()
    pace.observe(10, 0, 3.0)
    assert pace.estimate_tokens(10, 5.0) == 0


def test_the_time_of_the_prompt_is_told_from_the_time_of_the_tokens() -> None:
    pace = learnt()
    assert pace.estimate_tokens(100, 100 * BLOCK_S - 0.01) == 0
    assert pace.estimate_tokens(100, 100 * BLOCK_S + 30.5 * TOKEN_S) == 30
    assert pace.estimate_tokens(0, 30.5 * TOKEN_S) == 30


def test_waits_of_chance_do_not_mislead_it_by_much() -> None:
    assert learnt(noise=0.4).estimate_tokens(100, 100 * BLOCK_S + 50 * TOKEN_S) == pytest.approx(50, abs=10)


def test_an_answer_is_not_taken_to_be_longer_than_they_are_on_average() -> None:
    assert learnt().estimate_tokens(0, 1e6) == pytest.approx(100, abs=10)


def test_of_answers_that_are_alike_all_time_is_taken_for_decoding() -> None:
    pace = AnswerPace()
    for _ in range(5):
        pace.observe(100, 50, 2.0)
    assert pace.estimate_tokens(100, 1.02) == 25


def test_where_prompts_seem_to_cost_less_than_nothing_all_time_is_taken_for_decoding() -> None:
    pace = AnswerPace()
    pace.observe(0, 10, 2.0)
    pace.observe(10, 10, 1.0)
    assert pace.estimate_tokens(0, 0.76) == 5


def test_answers_that_took_no_time_say_nothing() -> None:
    pace = AnswerPace()
    pace.observe(1, 10, 0.0)
    assert pace.estimate_tokens(0, 5.0) == 0
