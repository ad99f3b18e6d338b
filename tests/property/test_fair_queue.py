"""The fair queue between keys: nobody starves, no place is idle, weights are held, newcomers are quick.

The workers are places that each compute a request for as long as its tokens take, which is how an engine at
its full batch behaves.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.routing.fair_queue import ANSWER_WEIGHT, FairQueue

SECONDS_PER_TOKEN = 0.02


@dataclass(frozen=True)
class Asked:
    """One request."""

    key: str
    number: int
    prompt: int
    answer: int
    arrived_s: float = 0.0


@dataclass
class Box:
    """Places behind a fair queue, in virtual time. ``work`` is what each key was given, as it is weighed."""

    places: int
    weights: dict[str, float]
    keeps_places: bool = True
    queue: FairQueue[Asked] = field(default_factory=FairQueue)
    now_s: float = 0.0
    work: Counter[str] = field(default_factory=Counter)
    waited_s: dict[Asked, float] = field(default_factory=dict)
    running: list[tuple[float, int, Asked, float]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def ask(self, request: Asked) -> None:
        """Begin with it where nobody waits and there is a place; else it joins those who wait."""
        if not self.queue.waiting and self._may_begin(request):
            self._begin(request)
        else:
            self.queue.join(request.key, self.weights[request.key], request, self.now_s)
            self.fill()

    def fill(self) -> None:
        while (request := self.queue.first()) and self._may_begin(request):
            self._begin(request)

    def _begin(self, request: Asked) -> None:
        weight = self.weights[request.key]
        counted = self.queue.begin(request.key, weight, request, request.prompt, self.now_s)
        end_s = self.now_s + request.answer * SECONDS_PER_TOKEN
        heapq.heappush(self.running, (end_s, next(self._order), request, counted))
        self.waited_s[request] = self.now_s - request.arrived_s

    def _may_begin(self, request: Asked) -> bool:
        free = self.places - len(self.running)
        if not self.keeps_places:
            return free > 0
        return self.queue.may_begin(request.key, free, self.places, self.now_s)

    def step(self) -> Asked:
        """Go on to the end of the next request, and return it."""
        self.now_s, _, request, counted = heapq.heappop(self.running)
        self.queue.end(request.key, self.now_s)
        self.queue.correct(request.key, request.prompt, request.answer, counted)
        self.work[request.key] += request.prompt + ANSWER_WEIGHT * request.answer
        self.fill()
        return request


def backlog(box: Box, random: Random, key: str, sizes: tuple[int, int], requests: int) -> None:
    prompt, answer = sizes
    for number in range(requests):
        box.queue.join(
            key,
            box.weights[key],
            Asked(key, number, random.randint(1, 2 * prompt), random.randint(1, 2 * answer)),
            0.0,
        )


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.25, 1.0, 4.0]), min_size=2, max_size=3))
def test_keys_that_wait_all_the_time_get_their_weights_within_five_percent(
    seed: int, weights: list[float]
) -> None:
    random = Random(seed)
    box = Box(4, {f"k{index}": weight for index, weight in enumerate(weights)})
    # Whatever the sizes of their requests; each that ends is followed by another.
    sizes = {key: (random.choice([100, 800]), random.choice([50, 200])) for key in box.weights}
    for key in box.weights:
        backlog(box, random, key, sizes[key], 10)
    box.fill()
    while sum(box.work.values()) < 6_000_000:
        key = box.step().key
        backlog(box, random, key, sizes[key], 1)
    total = sum(weights)
    for key, weight in box.weights.items():
        assert box.work[key] / sum(box.work.values()) == pytest.approx(weight / total, rel=0.05), box.work


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 5))
def test_no_place_is_idle_while_a_request_waits_but_those_that_are_kept(
    seed: int, places: int, keys: int
) -> None:
    random = Random(seed)
    box = Box(places, {f"k{index}": 1.0 for index in range(keys)})
    for number in range(60):
        for key in random.sample(sorted(box.weights), random.randint(0, keys)):
            box.ask(Asked(key, number, random.randint(1, 500), random.randint(1, 50), box.now_s))
        if box.running and random.random() < 0.7:
            box.step()
        if box.queue.first():
            free = places - len(box.running)
            assert free <= places // 4
    alone = Box(places, {"k0": 1.0}, keeps_places=False)
    backlog(alone, random, "k0", (100, 10), 50)
    alone.fill()
    while alone.queue.first():
        assert len(alone.running) == places
        alone.step()


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_nobody_starves_whatever_the_others_send(seed: int, places: int) -> None:
    random = Random(seed)
    box = Box(places, {"flood": 4.0, "flood2": 4.0, "small": 0.25})
    for key in ("flood", "flood2"):
        backlog(box, random, key, (1000, 100), 3_000)
    box.fill()
    for _ in range(50):
        box.step()
    mine = Asked("small", 0, 10, 10, box.now_s)
    box.ask(mine)
    steps = 0
    while mine not in box.waited_s:
        box.step()
        steps += 1
    assert steps <= 3 * places


def test_who_was_away_has_saved_up_nothing_and_owes_nothing() -> None:
    box = Box(1, {"a": 1.0, "b": 1.0})
    backlog(box, Random(1), "a", (100, 100), 200)
    box.fill()
    for _ in range(50):  # a alone
        box.step()
    backlog(box, Random(2), "b", (100, 100), 200)
    before = box.work["a"]
    for _ in range(100):
        box.step()
    assert (box.work["a"] - before) / box.work["b"] == pytest.approx(1.0, rel=0.25)


def test_a_person_beside_a_script_of_2000_waits_hardly_and_the_script_has_all_the_rest() -> None:
    """Alone the script would take all places; beside a person it has all but the one that is kept."""

    def run(*, has_person: bool) -> tuple[float, list[float]]:
        random, box = Random(7), Box(16, {"script": 1.0, "person": 1.0})
        next_s, number = 0.0, 0
        for index in range(2000):
            box.ask(Asked("script", index, 500, random.randint(50, 350)))
        while box.running:
            while has_person and box.running and next_s <= box.running[0][0]:
                box.now_s = next_s
                box.ask(Asked("person", number, 500, 100, next_s))
                number += 1
                next_s += 6.0  # reads, thinks, and asks again
            if box.step().key == "person":
                assert box.waited_s
            if box.work["script"] >= 2000 * 500:
                break
        waits_s = [waited_s for asked, waited_s in box.waited_s.items() if asked.key == "person"]
        return box.now_s, waits_s

    alone_s, _ = run(has_person=False)
    beside_s, waits_s = run(has_person=True)
    assert quantiles(waits_s, n=20)[-1] == 0.0
    assert beside_s <= alone_s * 16 / 15 * 1.02


def test_who_asks_again_before_the_next_request_of_a_script_has_begun_waits_for_none_to_end() -> None:
    random, box = Random(3), Box(4, {"script": 1.0, "person": 1.0})
    backlog(box, random, "script", (500, 200), 300)
    box.fill()
    next_s = 10.0
    for number in range(100):
        while box.running[0][0] < next_s:
            if box.step().key == "person":
                next_s = box.now_s + 1.0  # reads, and asks again
        box.now_s = next_s
        box.ask(Asked("person", number, 100, 40, next_s))
        next_s = float("inf")
        while next_s == float("inf"):
            if box.step().key == "person":
                next_s = box.now_s + 1.0
    waits_s = [waited_s for asked, waited_s in box.waited_s.items() if asked.key == "person"]
    assert quantiles(waits_s[1:], n=20)[-1] == 0.0
    assert box.work["person"] < box.work["script"] / 3


def test_shares_and_waiting_requests_are_told_by_key() -> None:
    box = Box(1, {"a": 1.0, "b": 1.0})
    backlog(box, Random(1), "a", (100, 100), 3)
    backlog(box, Random(1), "b", (100, 100), 2)
    box.fill()
    for _ in range(2):
        box.step()
    told = {each.key: each for each in box.queue.turns(box.now_s)}
    assert (told["a"].waiting + told["a"].running, told["b"].waiting + told["b"].running) == (2, 1)
    assert told["a"].work > told["b"].work > 0
