"""TTFT and ITL of an engine, computed from the times of its answers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.lab.profiling.load.completions import Answer

TRIMMED = 0.15
"""The part of the shared time that is left out at its beginning: prompts computed just before may delay it.

An equal part is left out at its end, so that the mean context stays the same.
"""

LEAST_SHARED = 0.1
"""The least part of each answer's tokens that must have come in the remaining time."""


@dataclass(frozen=True)
class Together:
    """ITL and throughput over the time in which all answers decoded and no prompt was computed.

    ``shared`` is the part of an answer's tokens that came in that time, from 0 to 1, the mean over answers.
    """

    itl_ms: float
    output_tokens_per_s: float
    shared: float


def alone_ttft_ms(answers: Sequence[Answer]) -> float:
    """Return the TTFT in ms of requests sent one by one: the least, as delays are not the engine's."""
    return min(answer.ttft_ms for answer in answers)


def are_side_by_side(answers: Sequence[Answer]) -> bool:
    """Tell whether all answers had begun before the first one ended."""
    return _begun_s(answers) <= _ended_s(answers)


def decoded_together(answers: Sequence[Answer]) -> Together | None:
    """Measure from the last answer's first token to the first answer's last token.

    Before and after, fewer answers decode than the load has, and prompts may be computed beside them. A
    single answer is measured from its second token on. None when an answer has less than a tenth of its
    tokens in that time, or all tokens came at the same moment.
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
