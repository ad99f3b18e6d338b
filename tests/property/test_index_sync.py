"""After any events, losses, deaths, outages and questions a frontend's index equals what the workers hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynaplan.engines.kv_events import (
    BlockChange,
    CachedBlocks,
    CacheSnapshot,
    Cleared,
    KvEvent,
    Removed,
    Stored,
)
from dynaplan.routing import kv_index as index_module
from dynaplan.routing.kv_index import IndexSync, KvIndex

BLOCKS = st.lists(st.integers(0, 12), max_size=5).map(tuple)
CHANGES: st.SearchStrategy[BlockChange] = st.one_of(
    BLOCKS.map(lambda blocks: Stored(None, blocks, blocks)), BLOCKS.map(Removed), st.just(Cleared())
)
PICK = st.integers(0, 2)


@dataclass
class Worker:
    """One worker with its engine, and its events that are on their way."""

    worker_id: int
    cache: CachedBlocks = field(default_factory=CachedBlocks)
    held: set[int] = field(default_factory=set)
    on_the_way: deque[KvEvent] = field(default_factory=deque)
    has_lost: bool = False

    def change(self, changes: list[BlockChange]) -> None:
        for change in changes:
            match change:
                case Stored(_, hashes, _):
                    self.held.update(hashes)
                case Removed(hashes):
                    self.held.difference_update(hashes)
                case _:
                    self.held.clear()
        self.on_the_way.extend(self.cache.events(self.worker_id, changes))


@dataclass
class Question:
    """A question for a snapshot: asked, answered at some time, and taken over slice by slice."""

    worker: Worker
    ticket: int
    answer: CacheSnapshot | None = None
    slices: Iterator[None] | None = None


class Following(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.following = IndexSync(self.index)
        self.workers: list[Worker] = []
        self.questions: list[Question] = []
        self.next_id = 100

    def tell_present(self) -> None:
        self.following.set_workers(worker.worker_id for worker in self.workers)

    def worker(self, pick: int) -> Worker:
        return self.workers[pick % len(self.workers)]

    @rule(changes=st.lists(CHANGES, max_size=3))
    @precondition(lambda self: len(self.workers) < 3)
    def a_worker_comes(self, changes: list[BlockChange]) -> None:
        worker = Worker(self.next_id)
        self.next_id += 1
        worker.change(changes)
        worker.on_the_way.clear()  # what it published before somebody listened
        self.workers.append(worker)
        self.tell_present()

    @rule(pick=PICK)
    @precondition(lambda self: self.workers)
    def a_worker_dies(self, pick: int) -> None:
        self.workers.remove(self.worker(pick))
        self.tell_present()

    @rule(pick=PICK)
    @precondition(lambda self: self.workers)
    def a_worker_registers_again(self, pick: int) -> None:
        worker = self.worker(pick)
        worker.worker_id = self.next_id
        self.next_id += 1
        self.tell_present()

    @rule(pick=PICK, changes=st.lists(CHANGES, min_size=1, max_size=3))
    @precondition(lambda self: self.workers)
    def an_engine_steps(self, pick: int, changes: list[BlockChange]) -> None:
        self.worker(pick).change(changes)

    @rule(pick=PICK, again=st.booleans())
    @precondition(lambda self: self.workers)
    def an_event_arrives(self, pick: int, again: bool) -> None:
        worker = self.worker(pick)
        if worker.on_the_way:
            event = worker.on_the_way.popleft()
            for _ in range(1 + again):
                self.following.apply(event)

    @rule(pick=PICK)
    @precondition(lambda self: self.workers)
    def an_event_is_lost(self, pick: int) -> None:
        worker = self.worker(pick)
        if worker.on_the_way:
            worker.on_the_way.popleft()
            worker.has_lost = True

    @rule()
    def the_event_plane_breaks(self) -> None:
        for worker in self.workers:
            worker.on_the_way.clear()
            worker.has_lost = False
        self.following.invalidate()

    @rule()
    def what_is_wanted_is_asked(self) -> None:
        for wanted in self.following.missing_snapshots():
            (worker,) = (each for each in self.workers if each.worker_id == wanted)
            self.questions.append(Question(worker, self.following.request_snapshot(wanted)))

    @rule(pick=PICK)
    @precondition(lambda self: self.questions)
    def a_question_goes_on(self, pick: int) -> None:
        question = self.questions[pick % len(self.questions)]
        asked = question.worker
        if question.answer is None:
            question.answer = asked.cache.snapshot(asked.worker_id)
        elif question.slices is None:
            answer = question.answer
            question.slices = self.following.load_snapshot(answer.worker_id, question.ticket, answer)
        elif next(question.slices, StopIteration) is StopIteration:
            self.questions.remove(question)

    @rule(count=st.integers(1, 5))
    def the_index_is_swept(self, count: int) -> None:
        self.index.sweep(count)

    @invariant()
    def the_index_has_what_a_current_worker_holds(self) -> None:
        for worker in self.workers:
            if self.following.is_current(worker.worker_id) and not worker.on_the_way and not worker.has_lost:
                assert self.blocks_of(worker) == worker.held

    def teardown(self) -> None:
        """When all have been asked and everything has arrived, everything is known."""
        for worker in self.workers:
            worker.change([Removed(())])
        for _ in range(100):
            if not (
                self.questions
                or self.following.missing_snapshots()
                or any(each.on_the_way for each in self.workers)
            ):
                break
            for worker in self.workers:
                while worker.on_the_way:
                    self.following.apply(worker.on_the_way.popleft())
            self.what_is_wanted_is_asked()
            for _ in self.questions:
                self.a_question_goes_on(0)
        for worker in self.workers:
            assert self.following.is_current(worker.worker_id)
            assert self.blocks_of(worker) == worker.held
        while self.index.sweep():
            pass
        assert len(self.index) == len(set().union(*(worker.held for worker in self.workers)))
        assert set(self.index.workers) == {worker.worker_id for worker in self.workers}

    def blocks_of(self, worker: Worker) -> set[int]:
        return {block for block in range(13) if worker.worker_id in self.index.overlaps([block])}


def setup_module() -> None:
    index_module.SLICE_BLOCKS = 2
    index_module.MAX_WAITING_EVENTS = 3


def teardown_module() -> None:
    index_module.SLICE_BLOCKS = 4096
    index_module.MAX_WAITING_EVENTS = 4096


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
