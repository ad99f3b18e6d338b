"""A trace as the quick models read it: each request's own costs in arrays, cut into windows of time.

The arrays take some 40 bytes of memory for a request, so a trace of a million requests fits.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from dynaplan.engines.timing_model.hand_off import hand_off_s
from dynaplan.engines.timing_model.timing import StepTiming
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.sizing.queueing.queueing_model import FIRST_TOKEN_STEPS
from dynaplan.simulation.service import ServiceSettings

LEAST_WINDOW_S = 2
"""The shortest window, in seconds: shorter ones multiply the search, to save a worker for a second."""

MOST_WINDOWS = 480
"""The largest number of windows: the local search tries a few changes for each, so its time grows with it."""


@dataclass(frozen=True)
class TraceArrays:
    """The requests that engines can serve, in order of arrival, by their number; times in seconds.

    ``least_prefill_s`` is the least computing of a prompt, without ``fixed_s``, the fixed cost of a prefill
    step, T(0): T(prompt) - T(the tokens in blocks that an earlier prompt had), as if one endless cache served
    all workers. Its real cost depends on the schedule (``prompt_costs``). ``rest_s`` is the part of a TTFT
    that is neither waiting nor computing: the hand-off, and ``FIRST_TOKEN_STEPS`` decode steps of half the
    ITL target each; 0 for aggregated workers. ``steps`` are decode steps: the output tokens after the first.
    ``first`` has the number of the first request of each window, and at its end the number of requests;
    windows are ``width_s`` long and end at ``end_s``, the last arrival. ``lost_at`` are the places in the
    trace of requests without prompt or output, or too long for the context of the engine that computes
    prompts; they are in no array. ``are_prefixes_shared``: prefixes are cached and prompts have block hashes.
    ``timing`` is the engine's that computes prompts.
    """

    arrival_s: array[float]
    least_prefill_s: array[float]
    rest_s: array[float]
    prompt_tokens: array[int]
    steps: array[int]
    first: list[int]
    width_s: int
    end_s: float
    fixed_s: float
    lost_at: list[int]
    are_prefixes_shared: bool
    timing: StepTiming

    @property
    def windows(self) -> int:
        """The number of windows; at least 1."""
        return len(self.first) - 1

    @property
    def lost(self) -> int:
        """The number of requests that no engine can serve."""
        return len(self.lost_at)

    def computing_s(self, number: int, cached_tokens: int) -> float:
        """Return the seconds of computing a prompt of which that much is cached, without ``fixed_s``."""
        cached_ms = self.timing.prefill_ms(cached_tokens)
        return (self.timing.prefill_ms(self.prompt_tokens[number]) - cached_ms) / 1000

    def number_of(self, place: int) -> int | None:
        """Return the number of the request at that place in the trace, from 0 on; None for a lost one."""
        before = bisect_left(self.lost_at, place)
        is_lost = before < len(self.lost_at) and self.lost_at[before] == place
        return None if is_lost else place - before

    def window_of(self, number: int) -> int:
        """Return the window in which a request arrived."""
        return min(int(self.arrival_s[number] // self.width_s), self.windows - 1)


def trace_arrays(trace: Iterable[TracedRequest], settings: ServiceSettings) -> TraceArrays:
    """Read the whole trace."""
    engine, timing = settings.engines[Role.PREFILL if Role.PREFILL in settings.engines else Role.DECODE]
    is_remote = Role.PREFILL in settings.engines
    arrival_s, least_prefill_s, rest_s = array("d"), array("d"), array("d")
    prompt_tokens, steps = array("l"), array("l")
    seen: set[int] = set()
    lost_at: list[int] = []
    end_s = 0.0
    step_s = settings.slo.itl_ms / 2000  # a decode step is taken to last half the ITL target
    for place, request in enumerate(trace):
        end_s = request.arrival_s
        prompt, output = request.prompt_tokens, request.output_tokens
        if min(prompt, output) < 1 or prompt + output > engine.context_tokens:
            lost_at.append(place)
            continue
        cached = _cached_tokens(request, engine.block_tokens, seen) if engine.is_prefix_caching else 0
        arrival_s.append(end_s)
        least_prefill_s.append((timing.prefill_ms(prompt) - timing.prefill_ms(cached)) / 1000)
        rest_s.append(hand_off_s(prompt) + FIRST_TOKEN_STEPS * step_s if is_remote else 0.0)
        prompt_tokens.append(prompt)
        steps.append(output - 1)
    width_s = max(LEAST_WINDOW_S, math.ceil(end_s / MOST_WINDOWS))
    edges = range(max(1, math.ceil(end_s / width_s)))
    return TraceArrays(
        arrival_s,
        least_prefill_s,
        rest_s,
        prompt_tokens,
        steps,
        first=[*(bisect_left(arrival_s, edge * width_s) for edge in edges), len(arrival_s)],
        width_s=width_s,
        end_s=end_s,
        fixed_s=timing.prefill_ms(0) / 1000,
        lost_at=lost_at,
        are_prefixes_shared=bool(seen),
        timing=timing,
    )


def _cached_tokens(request: TracedRequest, block_tokens: int, seen: set[int]) -> int:
    """Return the tokens of the prompt in blocks that are ``seen``, and add its own blocks to them."""
    if not request.block_hashes:
        return 0
    hashes = request.with_blocks_of(block_tokens).block_hashes
    known = next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))
    seen.update(hashes[known:])
    return min(known * block_tokens, request.prompt_tokens - 1)
