"""A trace as the oracle's quick models read it: what each request costs, cut into windows of time."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from dynaplan.core.sizing.queueing_model import FIRST_TOKEN_STEPS
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.service import TRANSFER_BASE_S, TRANSFER_S_PER_TOKEN, ServiceSettings

LEAST_WINDOW_S = 2
MOST_WINDOWS = 480
"""The number of workers changes at the edges of windows: at most so many, none shorter than 2 s."""


@dataclass(frozen=True)
class Requests:
    """The requests that can be served at all, in order of arrival; times in seconds, lengths in tokens.

    ``prefill_s`` is a prompt's own computing, without the ``fixed_s`` that a prefill step costs whatever is
    in it. ``rest_s`` is what a TTFT has besides queueing and computing. ``first`` are the numbers of the
    first request of each window, and the number of requests. ``lost`` can never be served.
    """

    arrival_s: array[float]
    prefill_s: array[float]
    rest_s: array[float]
    prompt_tokens: array[int]
    steps: array[int]
    first: list[int]
    width_s: int
    end_s: float
    fixed_s: float
    lost: int
    are_prefixes_shared: bool

    @property
    def windows(self) -> int:
        """How many windows there are; at least one."""
        return len(self.first) - 1

    def window_of(self, number: int) -> int:
        """The window in which a request arrived."""
        return min(int(self.arrival_s[number] // self.width_s), self.windows - 1)


def requests_of(trace: Iterable[TracedRequest], settings: ServiceSettings) -> Requests:
    """Read the whole trace: some 40 bytes of each request are kept.

    A block of a prompt that an earlier prompt had counts as cached, wherever that one was computed.
    """
    engine, timing = settings.engines[Role.PREFILL if Role.PREFILL in settings.engines else Role.DECODE]
    is_remote = Role.PREFILL in settings.engines
    arrival_s, prefill_s, rest_s = array("d"), array("d"), array("d")
    prompt_tokens, steps = array("l"), array("l")
    seen: set[int] = set()
    lost, end_s = 0, 0.0
    step_s = settings.slo.itl_ms / 2000
    for request in trace:
        end_s = request.arrival_s
        prompt, output = request.prompt_tokens, request.output_tokens
        if min(prompt, output) < 1 or prompt + output > engine.context_tokens:
            lost += 1
            continue
        cached = _cached(request, engine.block_tokens, seen) if engine.is_prefix_caching else 0
        arrival_s.append(end_s)
        prefill_s.append((timing.prefill_ms(prompt) - timing.prefill_ms(cached)) / 1000)
        rest_s.append(
            TRANSFER_BASE_S + prompt * TRANSFER_S_PER_TOKEN + FIRST_TOKEN_STEPS * step_s if is_remote else 0.0
        )
        prompt_tokens.append(prompt)
        steps.append(output - 1)
    width_s = max(LEAST_WINDOW_S, math.ceil(end_s / MOST_WINDOWS))
    edges = range(max(1, math.ceil(end_s / width_s)))
    first = [*(bisect_left(arrival_s, edge * width_s) for edge in edges), len(arrival_s)]
    fixed_s = timing.prefill_ms(0) / 1000
    return Requests(
        arrival_s, prefill_s, rest_s, prompt_tokens, steps, first, width_s, end_s, fixed_s, lost, bool(seen)
    )


def _cached(request: TracedRequest, block_tokens: int, seen: set[int]) -> int:
    """The tokens of the prompt that the blocks seen so far hold; its own are seen from now on."""
    if not request.block_hashes:
        return 0
    hashes = request.with_blocks_of(block_tokens).block_hashes
    known = next((index for index, each in enumerate(hashes) if each not in seen), len(hashes))
    seen.update(hashes[known:])
    return min(known * block_tokens, request.prompt_tokens - 1)
