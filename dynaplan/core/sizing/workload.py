"""A demand as one kind of worker feels it: milliseconds of computing, decode steps, tokens of KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import StepTiming
from dynaplan.core.forecasting.lengths import Points, points_of
from dynaplan.domain.planning.traffic import Demand

MOST_HIT = 0.95
"""A higher prefix hit rate is not counted on."""


@dataclass(frozen=True)
class WorkerKind:
    """The workers of one role, which are all alike.

    ``concurrent_prefills`` is how many prompts a prefill worker takes from the queue at once.
    """

    timing: StepTiming
    settings: EngineSettings
    concurrent_prefills: int = 4

    @property
    def kv_tokens(self) -> int:
        """The KV cache of one worker."""
        return self.settings.total_blocks * self.settings.block_tokens

    def slowed(self, factor: float) -> WorkerKind:
        """Workers each of whose steps takes that many times as long."""
        return replace(self, timing=self.timing.sped_up(1 / factor))

    def decode_ms(self, requests: float, kv_tokens: float) -> float:
        """A step that decodes so many requests, on average, with that much KV between them."""
        return self.timing.decode_ms(requests, kv_tokens)  # type: ignore[arg-type]  # fractions are read too


@dataclass(frozen=True, slots=True)
class Prompts:
    """What prompts cost, in ms: each its own part, and each step that begins any the fixed one.

    ``points`` are (tokens to compute, ms, share); the moments are of those ms.
    """

    points: tuple[tuple[float, float, float], ...]
    fixed_ms: float
    mean_tokens: float
    mean_ms: float
    square_ms: float
    cube_ms: float

    @property
    def variance_ms(self) -> float:
        """The variance of a prompt's own part."""
        return max(self.square_ms - self.mean_ms**2, 0.0)


@dataclass(frozen=True, slots=True)
class Answers:
    """What answers cost: the decode steps of each, and the context of a request that is being decoded.

    ``points`` are the steps. ``evenness`` is the mean of the shorter one of two answers over the mean of one.
    """

    points: Points
    mean_steps: float
    square_steps: float
    context_tokens: float
    context_square: float
    evenness: float


def prompts_of(demand: Demand, kind: WorkerKind) -> Prompts:
    """The prompts of a demand on such workers."""
    prefill_ms = kind.timing.prefill_ms
    hit = min(max(demand.prefix_hit_rate, 0.0), MOST_HIT)
    points = points_of(demand.isl, kind.settings.context_tokens)
    costs = []
    for tokens, share in zip(points.tokens, points.shares, strict=True):
        cached = int(tokens * hit)
        costs.append((tokens - cached, max(prefill_ms(round(tokens)) - prefill_ms(cached), 0.0), share))
    return Prompts(
        tuple(costs),
        prefill_ms(0),
        sum(tokens * share for tokens, _, share in costs),
        *(sum(ms**power * share for _, ms, share in costs) for power in (1, 2, 3)),
    )


def answers_of(demand: Demand, kind: WorkerKind) -> Answers:
    """The answers of a demand. Who is in flight is the likelier the longer its answer."""
    longest = kind.settings.context_tokens
    isl, osl = points_of(demand.isl, longest), points_of(demand.osl, longest)
    steps = tuple(max(tokens - 1.0, 0.0) for tokens in osl.tokens)
    points = Points(steps, osl.shares)
    mean = points.moment(1)
    if not mean:
        return Answers(points, 0.0, 0.0, isl.moment(1), isl.moment(2), 1.0)
    square = points.moment(2)
    done = square / mean / 2
    done_square = points.moment(3) / mean / 3
    return Answers(
        points,
        mean,
        square,
        isl.moment(1) + done,
        isl.moment(2) + 2 * isl.moment(1) * done + done_square,
        _mean_of_shorter(points) / mean,
    )


def _mean_of_shorter(points: Points) -> float:
    """The mean of the shorter one of two independent draws."""
    mean, longer = 0.0, 1.0
    for tokens, share in zip(points.tokens, points.shares, strict=True):
        rest = longer - share
        mean += tokens * (longer * longer - rest * rest)
        longer = rest
    return mean
