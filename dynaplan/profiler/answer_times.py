"""What answers that were computed at the same time say about the engine."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.profiler.completions import Answer

TRIMMED = 0.15
"""The part of the time together that is left out at its beginning, and at its end: prompts that were computed
just before may delay what comes first. Equal parts, so that the mean context stays the same."""

LEAST_SHARED = 0.1
"""The part of each answer that must have been decoded in what is left."""


@dataclass(frozen=True)
class Together:
    """The time in which all of them decoded, and none of them was prefilled.

    ``shared`` is the part of an answer's tokens that came in that time, from 0 to 1, the mean of all.
    """

    itl_ms: float
    output_tokens_per_s: float
    shared: float


def alone_ttft_ms(answers: Sequence[Answer]) -> float:
    """The TTFT in ms of requests that came one by one: the least, for what delays one is not the engine."""
    return min(answer.ttft_ms for answer in answers)


def are_side_by_side(answers: Sequence[Answer]) -> bool:
    """Whether all of them had begun before the first one ended."""
    return _begun_s(answers) <= _ended_s(answers)


def decoded_together(answers: Sequence[Answer]) -> Together | None:
    """The mean ITL from the moment the last one had its first token until the first one had its last.

    Before and after, fewer decode than are meant to, and prompts may be computed beside them; one that is
    alone is so from its second token on. None when that is not a tenth of each answer's tokens, or
    all of them came at the same moment.
    """
    begun_s, ended_s = _begun_s(answers), _ended_s(answers)
    margin_s = TRIMMED * max(ended_s - begun_s, 0.0)
    from_s, to_s = begun_s + margin_s, ended_s - margin_s
    if len(answers) == 1:
        from_s, to_s = answers[0].event_times_s[min(1, len(answers[0].event_times_s) - 1)], ended_s
    duration_s = tokens = 0.0
    shares = []
    for answer in answers:
        times_s = answer.event_times_s
        first, last = bisect_left(times_s, from_s), bisect_right(times_s, to_s) - 1
        steps = max(last - first, 0) * answer.tokens_per_event
        shares.append(steps / max(answer.output_tokens - 1, 1))
        if steps:
            tokens += steps
            duration_s += times_s[last] - times_s[first]
    shared = math.fsum(shares) / len(shares)
    if min(shares) < LEAST_SHARED or duration_s <= 0.0:
        return None
    itl_s = duration_s / tokens
    return Together(itl_s * 1000.0, len(answers) / itl_s, shared)


def _begun_s(answers: Sequence[Answer]) -> float:
    return max(answer.event_times_s[0] for answer in answers)


def _ended_s(answers: Sequence[Answer]) -> float:
    return min(answer.event_times_s[-1] for answer in answers)
