"""Who is next, where requests of several keys wait for the same workers. Pure: the caller has the clock.

**Virtual token counters** (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each key
has a counter of the work done for it, in tokens, over its weight:

    counter += (prompt + 2 * answer) / weight

A token of an answer is weighed double, as there: it takes a step of its own. The next request is the oldest
of the waiting key with the smallest counter, so keys that wait all the time get tokens in proportion to their
weights, whatever the sizes of their requests. A key that comes to wait is *lifted* to the smallest counter
among those that wait (to that of the last one served, where none does): who was away has saved up nothing,
and who was served alone owes nothing.

- *No starvation*: a waiting key's counter stands still while those of others grow.
- *Work-conserving*: there is a next request whenever one waits.
- *Bound*: of two keys that wait all the time, the work done over the weight differs by no more than twice the
  largest work that one of them has in hand at a time. It does not grow with time.

Work counts when a request begins, with the mean length of its key's answers, and is corrected when it has
ended: tokens are not counted one by one, and a key is not undercharged while its answers run.

**Nothing in hand.** A key that has nothing in hand goes before one that has, as long as it is ahead of that
one by less than one of its requests. Who asks one thing at a time, and again before the next request of a
script has begun, would else stand behind it, and wait for an answer to end, with far less than its share. It
adds one request to the bound above.

    script's counter 900, each request 400, 3 in hand; person's 996, nothing in hand: 996 < 1300, the person

**Places kept.** An engine takes back no place that it has given. Where all are taken, who comes now and then
waits for the next answer to end, however small his counter, and long answers make that seconds. So a place is
kept free for each key that has asked in the last minute and has nothing here now, a quarter of all at most.
Only requests of keys that have others in hand leave them free. With one key alone none is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from typing import Generic, TypeVar

ANSWER_WEIGHT = 2.0
"""Weight of an answer's token, a prompt's has 1."""

KEPT_S = 60.0
"""Time after its last request for which a place is kept for a key."""

KEPT_PART = 0.25
"""Part of the places that is kept at most."""

SHARE_S = 60.0
"""Time over which the work that ``turns`` tells fades to 1/e."""

ANSWERS_COUNTED = 0.9
"""Weight of the answers before, for each new one, in the mean of a key."""

T = TypeVar("T")


@dataclass
class _Key(Generic[T]):
    """The turns and the work of one key. ``running`` are its requests that have begun and not ended."""

    weight: float
    counter: float = 0.0
    waiting: deque[T] = field(default_factory=deque)
    running: int = 0
    last_work: float = 0.0
    last_s: float = 0.0
    answer_tokens: float = 0.0
    recent: float = 0.0
    recent_at_s: float = 0.0

    def recent_work(self, now_s: float) -> float:
        return self.recent * exp((self.recent_at_s - now_s) / SHARE_S)


@dataclass(frozen=True)
class KeyTurns:
    """What is shown of a key: its requests, and the recent work done for it, in weighted tokens."""

    key: str
    waiting: int
    running: int
    work: float


class FairQueue(Generic[T]):
    """Requests by key: ``join``, then ``begin`` or ``leave``, and ``end`` after ``begin``.

    One that comes while nobody waits may ``begin`` without having joined.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key[T]] = {}
        self.waiting: dict[str, _Key[T]] = {}
        """The keys that have requests which wait."""
        self._next: _Key[T] | None = None
        """The key whose turn it is, as long as nothing has changed."""
        self._last_counter = 0.0

    def join(self, name: str, weight: float, request: T, now_s: float) -> None:
        """Add a waiting request, behind those of the same key."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(weight)
        key.weight, key.last_s = weight, now_s
        if not key.waiting:
            least = self._last_counter
            if self.waiting:
                least = min([each.counter for each in self.waiting.values()])
            key.counter = max(key.counter, least)
            self.waiting[name] = key
            self._next = None
        key.waiting.append(request)

    def first(self) -> T | None:
        """Return the request whose turn it is; None where none waits.

        Its key has the least counted work, or nothing running and hardly more.
        """
        if not self.waiting:
            return None
        if self._next is None:
            self._next = self._find_next() if len(self.waiting) > 1 else next(iter(self.waiting.values()))
        return self._next.waiting[0]

    def _find_next(self) -> _Key[T]:
        least = min(self.waiting.values(), key=_place_in_order)
        if not least.running:
            return least
        ahead = least.counter + least.last_work / least.weight
        idle = [each for each in self.waiting.values() if not each.running and each.counter < ahead]
        return min(idle, key=_place_in_order, default=least)

    def leave(self, name: str, request: T) -> None:
        """Take a request out that waits no longer."""
        waiting = self._keys[name].waiting
        waiting.remove(request)
        if not waiting:
            del self.waiting[name]
            self._next = None

    def begin(self, name: str, weight: float, request: T, prompt_tokens: int, now_s: float) -> float:
        """Note that a request has a worker; return the work that was counted for it.

        It waits, or nobody does: then its key is lifted as if it had come to wait.
        """
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(weight)
        if key.waiting:
            self.leave(name, request)
        else:
            key.weight = weight
            key.counter = max(key.counter, self._last_counter)
        key.running += 1
        self._last_counter = key.counter
        key.last_work = work = prompt_tokens + ANSWER_WEIGHT * key.answer_tokens
        key.counter += work / key.weight
        key.recent = key.recent * exp((key.recent_at_s - now_s) / SHARE_S) + work
        key.recent_at_s = now_s
        self._next = None
        return work

    def end(self, name: str, now_s: float) -> None:
        """Note that a request which had begun has its worker no longer."""
        key = self._keys[name]
        key.running -= 1
        key.last_s = now_s
        self._next = None

    def correct(self, name: str, prompt_tokens: int, answer_tokens: int, counted: float) -> None:
        """Count what a request really had, in the place of the work that was ``counted`` when it began."""
        key = self._keys[name]
        missing = prompt_tokens + ANSWER_WEIGHT * answer_tokens - counted
        key.counter += missing / key.weight
        key.recent += missing  # as of the time when its key's last one began: work counts from there
        self._next = None
        kept = ANSWERS_COUNTED if key.answer_tokens else 0.0
        key.answer_tokens = kept * key.answer_tokens + (1 - kept) * answer_tokens

    def may_begin(self, name: str, free: int, places: int, now_s: float) -> bool:
        """Tell whether the key may take one of the ``free`` places.

        Of all ``places`` some are kept for keys that were there lately and have nothing in hand now.
        """
        if free <= 0:
            return False
        most_kept = int(places * KEPT_PART)
        if free > most_kept or self.is_newcomer(name):
            return True
        kept = sum(
            1
            for other, each in self._keys.items()
            if other != name and not each.running and not each.waiting and now_s - each.last_s < KEPT_S
        )
        return free > min(kept, most_kept)

    def first_of(self, name: str) -> T | None:
        """Return the key's oldest waiting request; None where none waits."""
        waiting = self._keys[name].waiting
        return waiting[0] if waiting else None

    def is_newcomer(self, name: str) -> bool:
        """Tell whether none of the key's requests runs."""
        return name not in self._keys or not self._keys[name].running

    def forget(self, now_s: float) -> None:
        """Forget keys that have had no request for long."""
        for name, each in list(self._keys.items()):
            if not each.waiting and not each.running and now_s - each.last_s > 10 * SHARE_S:
                del self._keys[name]

    def turns(self, now_s: float) -> Iterator[KeyTurns]:
        """Yield what every key has, the one with most work first."""
        work = {name: each.recent_work(now_s) for name, each in self._keys.items()}
        for name in sorted(work, key=lambda each: -work[each]):
            each = self._keys[name]
            yield KeyTurns(name, len(each.waiting), each.running, max(0.0, work[name]))


def _place_in_order(key: _Key[T]) -> tuple[float, int]:
    return key.counter, key.running
