"""The lengths of the requests that arrived in each interval, from those of the answers that ended in it.

Frontends count a length when its answer ends. So what ended in an interval came earlier, the longer it is the
more so, and the longest of the newest requests have not been counted at all: drawn as if it had arrived,
traffic is too short while a load grows or answers become longer.

**Dating back.** An answer of L tokens that ended at t arrived at about t - TTFT - (L - 1) ITL, by the means
of the interval in which it ended. The answers of an interval ended evenly over it, so each of their lengths
is shared between the intervals in which it may have arrived. F_i(L) are those of interval i.

**Those that still run.** A request that came in interval i, and has no end, has by now

    A_i = (time since then - TTFT) / ITL

tokens: it is a censored observation. N_i requests came; the part q of them never has a counted end (failed,
given up by the client), known from the intervals that are older than the longest answer. The chance that an
answer is longer than L is then the product-limit estimator (Kaplan and Meier, "Nonparametric estimation from
incomplete observations", 1958), over lengths l that ended:

    S(L) = product over l <= L of (1 - d(l) / n(l))
    d(l) = sum of F_i(l),  n(l) = sum of (1 - q) N_i - F_i(below l),  both over the i with A_i >= l

The (1 - q) N_i - sum F_i that run are drawn from what S leaves beyond A_i. These differences are uneven, as
the dates are not exact, and only their sum is not: those above 0 are scaled to it.

**Where it is wrong.** Means stand for the times of single answers. Beyond the longest answer that ended
nothing is known: what is older than that counts as long as it is old. Prompts are dated as their answers, and
how a prompt's length goes with its answer's is not known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from dynaplan.contract.traffic import Lengths
from dynaplan.planner.backtesting.intervals import Interval
from dynaplan.planner.sizing.queueing.workload import points_of

MIN_LENGTHS = 20.0
"""Requests of an interval below which its own lengths say less than those of the whole window."""

Weights = dict[float, float]
"""How many requests have that length, in tokens; parts of requests, too."""


def arrived_lengths(intervals: Sequence[Interval]) -> list[tuple[Weights, Weights]]:
    """Return the weights of the prompts and of the answers that arrived in each interval."""
    prompts, answers = _dated_back(intervals)
    ages = tokens_by_now(intervals)
    longest = max((tokens for each in answers for tokens in each), default=0.0)
    lost = _lost_part(intervals, answers, [age > longest for age in ages])
    came = [(1 - lost) * each.requests for each in intervals]
    running = _running(came, answers, [age <= longest for age in ages])
    survival = product_limit(came, answers, ages)
    known = zip(intervals, prompts, answers, running, ages, strict=True)
    return [
        _of_interval(interval, prompt, _with_running(answer, number, age, survival))
        if sum(answer.values()) + number >= MIN_LENGTHS
        else _of_interval(interval, _sum(prompts), dict(survival))
        for interval, prompt, answer, number, age in known
    ]


def _of_interval(interval: Interval, prompts: Weights, answers: Weights) -> tuple[Weights, Weights]:
    """Return these weights; in place of empty ones, those of the interval's own histogram."""
    return prompts or _weights(interval.isl, 1.0), answers or _weights(interval.osl, 1.0)


def _running(came: Sequence[float], ended: Sequence[Weights], is_young: Sequence[bool]) -> list[float]:
    """Return how many requests of each interval still run; only those where ``is_young`` have any."""
    left = [
        (number - sum(each.values())) if young else 0.0
        for number, each, young in zip(came, ended, is_young, strict=True)
    ]
    positive = sum(max(0.0, each) for each in left)
    part = max(0.0, sum(left)) / positive if positive else 0.0
    return [part * max(0.0, each) for each in left]


def product_limit(
    came: Sequence[float], ended: Sequence[Mapping[float, float]], ages: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the part of all answers that has each length, ascending, by the product-limit estimator.

    Of the requests that ``came`` in each interval those in ``ended``, by length, have ended; the others have
    ``ages`` tokens by now. What is longer than all that ended counts as the longest of these.
    """
    lengths = sorted({tokens for each in ended for tokens in each})
    left = list(came)
    survival, parts = 1.0, []
    for tokens in lengths:
        seen = [index for index, age in enumerate(ages) if age >= tokens]
        died = sum(ended[index].get(tokens, 0.0) for index in seen)
        at_risk = max(died, sum(left[index] for index in seen))
        for index, each in enumerate(ended):
            left[index] -= each.get(tokens, 0.0)
        part = survival * died / at_risk if at_risk > 0 else 0.0
        parts.append((tokens, part))
        survival -= part
    if parts:
        parts[-1] = (parts[-1][0], parts[-1][1] + survival)
    return parts


def _dated_back(intervals: Sequence[Interval]) -> tuple[list[Weights], list[Weights]]:
    """Return the prompts and the answers that ended in the window, by the interval of their arrival."""
    begins_s = list(accumulate((each.length_s for each in intervals), initial=intervals[0].begin_s))
    prompts: list[Weights] = [{} for _ in intervals]
    answers: list[Weights] = [{} for _ in intervals]
    for number, interval in enumerate(intervals):
        own = _weights(interval.isl, 1.0)
        dated = [0.0] * len(intervals)
        for tokens, count in _weights(interval.osl, interval.answered).items():
            took_s = (interval.ttft_ms + (tokens - 1) * interval.itl_ms) / 1000
            begin_s, end_s = begins_s[number] - took_s, begins_s[number + 1] - took_s
            index = max(0, bisect_right(begins_s, begin_s) - 1)
            while index < len(intervals) and begins_s[index] < end_s:
                within_s = min(end_s, begins_s[index + 1]) - max(begin_s, begins_s[index])
                part = count * max(0.0, within_s) / interval.length_s
                answers[index][tokens] = answers[index].get(tokens, 0.0) + part
                dated[index] += part
                index += 1
        for index, part in enumerate(dated):
            for tokens, share in own.items() if part else ():
                prompts[index][tokens] = prompts[index].get(tokens, 0.0) + part * share
    return prompts, answers


def _weights(lengths: Lengths, count: float) -> Weights:
    weights: Weights = {}
    points = points_of(lengths, math.inf)
    for tokens, share in zip(points.tokens, points.shares, strict=True) if count else ():
        whole = float(max(1, round(tokens)))
        weights[whole] = weights.get(whole, 0.0) + count * share
    return weights


def tokens_by_now(intervals: Sequence[Interval]) -> list[float]:
    """Return how many tokens an answer that was asked for in the middle of each interval has in the end."""
    ages, tokens = [], 0.0
    for each in reversed(intervals):
        rate = 1000 * each.length_s / each.itl_ms if each.itl_ms else math.inf
        waited = each.ttft_ms / each.itl_ms if each.itl_ms else 0.0
        ages.append(max(0.0, tokens + rate / 2 - waited))
        tokens += rate
    return ages[::-1]


def _lost_part(intervals: Sequence[Interval], ended: Sequence[Weights], is_old: Sequence[bool]) -> float:
    """Return the part of the requests of old intervals that never had a counted end."""
    came = sum(each.requests for each, old in zip(intervals, is_old, strict=True) if old)
    had = sum(sum(each.values()) for each, old in zip(ended, is_old, strict=True) if old)
    return max(0.0, 1 - had / came) if came else 0.0


def _with_running(
    ended: Weights, running: float, age: float, parts: Sequence[tuple[float, float]]
) -> Weights:
    beyond = [(tokens, part) for tokens, part in parts if tokens > age and part > 0]
    total = sum(part for _, part in beyond)
    if not running or not total:
        return ended
    longer = dict(ended)
    for tokens, part in beyond:
        longer[tokens] = longer.get(tokens, 0.0) + running * part / total
    return longer


def _sum(weights: Sequence[Weights]) -> Weights:
    total: Weights = {}
    for each in weights:
        for tokens, count in each.items():
            total[tokens] = total.get(tokens, 0.0) + count
    return total
