"""Bookings of answers that come whole grow with time."""

from __future__ import annotations

import pytest

from dynaplan.gateway import timing
from dynaplan.gateway.routing.whole_answers import WholeAnswers
from dynaplan.routing.booking import BookEntry, WorkerBook
from tests.fakes.polling import eventually


class Scene:
    """Whole answers on a clock of the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.book = WorkerBook()
        self.answers = WholeAnswers(lambda: self.now)

    def entry(self, *, prompt_blocks: int = 10, block_tokens: int = 16) -> BookEntry:
        return BookEntry(self.book, prompt_blocks, 4, block_tokens)

    async def learn(self) -> None:
        """An answer of 100 tokens in 2 s."""
        entry = self.entry()
        with self.answers.waiting(entry) as waited_for:
            self.now += 2.0
            waited_for.output_tokens = 100
        entry.close()


async def test_a_booking_grows_at_the_pace_of_earlier_answers_and_its_prompt_is_computed_then() -> None:
    here = Scene()
    await here.learn()
    entry = here.entry()
    with here.answers.waiting(entry):
        here.answers.update()
        assert (here.book.active_blocks, here.book.prefill_blocks) == (10, 6)
        here.now += 1.0
        here.answers.update()
        assert (here.book.active_blocks, here.book.prefill_blocks) == (10 + 50 // 16 + 1, 0)
    entry.close()
    here.answers.update()
    assert (here.book.in_flight, here.book.active_blocks, here.book.prefill_blocks) == (0, 0, 0)


async def test_before_the_first_answer_and_without_blocks_nothing_grows() -> None:
    here = Scene()
    with here.answers.waiting(here.entry()):
        here.now += 5.0
        here.answers.update()
        assert (here.book.active_blocks, here.book.prefill_blocks) == (10, 6)
    await here.learn()
    with here.answers.waiting(here.entry(block_tokens=0)):
        here.now += 5.0
        here.answers.update()
        assert here.book.prefill_blocks == 12


async def test_a_prompt_that_was_computed_elsewhere_is_no_prefill_work() -> None:
    here = Scene()
    with here.answers.waiting(here.entry(), is_prefilled=True):
        assert here.book.prefill_blocks == 0


async def test_an_attempt_that_fails_teaches_nothing() -> None:
    here = Scene()
    with pytest.raises(ConnectionError), here.answers.waiting(here.entry()) as waited_for:
        waited_for.output_tokens = 5
        raise ConnectionError
    with here.answers.waiting(here.entry()):
        here.now += 100.0
        here.answers.update()
        assert here.book.prefill_blocks == 12


async def test_answers_are_looked_at_by_themselves_while_any_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "WHOLE_ANSWERS_POLL_S", 0.01)
    here = Scene()
    await here.learn()
    with here.answers.waiting(here.entry()):
        here.now += 1.0
        await eventually(lambda: here.book.prefill_blocks == 0)
    await eventually(lambda: here.answers._timer is None)
