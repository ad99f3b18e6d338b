"""The requests of a window, drawn from what is known of its intervals.

- The arrivals of a pull are spread over it at random; over the interval, where pulls are not known.
- Lengths are drawn from those of the requests that arrived in it (``arrived_lengths.py``) in equal steps of
  their distribution (Weyl sequences, one for prompts and one for answers).
- The cached part of a prompt is a prefix that all prompts share.
- No request exceeds the engine's context, as none is served that does.

Lost are who sent what, and how a prompt's length goes with its answer's.

What is drawn for an interval depends on the interval: the number of requests before it, since the evidence
began, seeds its places and is where its Weyl sequences go on. So the next window, five minutes later, has the
same requests in the intervals that it shares with this one, but for the newest: of those some answers have
not ended yet, and their lengths are not known. An interval of which all have is ``is_settled``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.backtesting.arrived_lengths import Weights, arrived_lengths, tokens_by_now
from dynaplan.planner.backtesting.intervals import Interval
from dynaplan.util.splitmix import UniformDraws

WEYL_STEPS = (0.6180339887498949, 0.7548776662466927)
"""The steps by which lengths are drawn: the golden ratio's, and the plastic number's."""


@dataclass(frozen=True)
class DrawnInterval:
    """The requests of one interval, ``count`` in number; they are drawn when somebody reads ``requests``.

    Times are seconds since the evidence began. ``is_settled``: later backtests draw the same requests. Those
    of equal ``identity`` are the same interval of the same evidence.
    """

    begin_s: float
    end_s: float
    count: int
    draw: Callable[[], Sequence[TracedRequest]]
    is_settled: bool = False
    identity: object = None

    @cached_property
    def requests(self) -> Sequence[TracedRequest]:
        """The requests, in the order of their arrival."""
        return self.draw()


def draw_window(intervals: Sequence[Interval], engine: EngineSettings) -> list[DrawnInterval]:
    """Return these intervals with their requests, whose lengths fit the ``engine`` of the decode workers."""
    if not intervals:
        return []
    lengths, (_, *ages_of_next) = arrived_lengths(intervals), (*tokens_by_now(intervals), 0.0)
    longest = max((tokens for _, answers in lengths for tokens in answers), default=0.0)
    begin_s, before = intervals[0].begin_s, intervals[0].requests_before
    window = []
    for interval, own, next_age in zip(intervals, lengths, ages_of_next, strict=True):
        pulls = interval.arrivals or (interval.requests,)
        wholes = [math.floor(came + 0.5) for came in accumulate(pulls, initial=before)]
        requests = partial(_requests, interval, begin_s, wholes, own, engine)
        end_s, count, identity = begin_s + interval.length_s, wholes[-1] - wholes[0], (begin_s, before, pulls)
        window.append(DrawnInterval(begin_s, end_s, count, requests, next_age > longest, identity))
        begin_s, before = end_s, before + interval.requests
    return window


def _requests(
    interval: Interval,
    begin_s: float,
    wholes: Sequence[int],
    lengths: tuple[Weights, Weights],
    engine: EngineSettings,
) -> list[TracedRequest]:
    """Draw the requests of an interval.

    ``wholes`` are the whole requests since the evidence began: before the interval, and by the end of each
    pull.
    """
    draws, number, requests = UniformDraws(wholes[0]), wholes[0], []
    isl, osl = map(_LengthDraws, lengths)
    context_tokens, block_tokens = engine.context_tokens, engine.block_tokens
    pull_s = interval.length_s / (len(wholes) - 1)
    for pull, (earlier, after) in enumerate(pairwise(wholes)):
        for place in sorted(next(draws) for _ in range(after - earlier)):
            number += 1
            prompt = min(isl.at(number * WEYL_STEPS[0] % 1), context_tokens - 1)
            answer = min(osl.at(number * WEYL_STEPS[1] % 1), context_tokens - prompt)
            cached = tuple(range(int(prompt * interval.hit_rate) // block_tokens))
            at_s = begin_s + (pull + place) * pull_s
            requests.append(TracedRequest(at_s, prompt, answer, cached, block_tokens if cached else 0))
    return requests


class _LengthDraws:
    """Lengths in tokens by their place, 0 to 1, in a distribution."""

    def __init__(self, weights: Weights) -> None:
        self._tokens = sorted(weights)
        self._shares = list(accumulate(weights[each] for each in self._tokens))

    def at(self, place: float) -> int:
        place *= self._shares[-1]
        return int(self._tokens[min(bisect_left(self._shares, place), len(self._tokens) - 1)])
