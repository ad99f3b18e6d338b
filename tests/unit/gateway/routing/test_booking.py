"""The router's book: a request counts at its worker from the entry until its close."""

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.gateway.routing.booking import BookEntry, WorkerBook


def test_an_entry_counts_its_request_its_blocks_and_those_to_compute() -> None:
    book = WorkerBook()
    BookEntry(book, prompt_blocks=10, overlap_blocks=4)

    assert (book.in_flight, book.active_blocks, book.prefill_blocks) == (1, 10, 6)


def test_a_computed_prompt_is_no_prefill_work_and_stays_active() -> None:
    book = WorkerBook()
    entry = BookEntry(book, prompt_blocks=10)
    entry.prefilled()
    entry.prefilled()

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
            entry.prefilled()
        entry.close()

    assert book == WorkerBook()


def test_an_answer_fills_blocks_while_it_is_decoded_and_close_gives_them_back() -> None:
    book = WorkerBook()
    entry = BookEntry(book, prompt_blocks=2, block_tokens=16, begun_tokens=6)
    assert entry.grows_at_tokens == 1

    entry.decoded(1)
    assert (book.active_blocks, entry.grows_at_tokens) == (3, 11)
    entry.decoded(10)
    assert book.active_blocks == 3
    entry.decoded(11)
    assert book.active_blocks == 4
    entry.decoded(60)
    assert (book.active_blocks, entry.grows_at_tokens) == (2 + 5, 5 * 16 - 6 + 1)
    entry.close()
    assert book == WorkerBook()


def test_an_answer_of_unknown_blocks_fills_none() -> None:
    book = WorkerBook()
    BookEntry(book).decoded(1000)
    assert book.active_blocks == 0


def test_what_other_routers_have_at_a_worker_counts_too() -> None:
    book = WorkerBook(1, 10, 4)
    candidate = book.candidate(7, 0, WorkerBook(2, 20, 5))
    assert (candidate.in_flight, candidate.active_blocks, candidate.prefill_blocks) == (3, 30, 9)
    assert book == WorkerBook(1, 10, 4)
