"""Which loads a profiling sweep puts on an engine. Source: Dynamo's profile_sla (0.2 to 0.9), where not said.

Lengths and concurrencies are spread over everything that the engine can hold, never beyond: a request that
waits for KV or for a slot would be measured as one that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dynaplan.domain.errors import ConfigError

SHORTEST_TOKENS = 100
"""The shortest prompt that is measured, where the context leaves that room."""

PREFILL_OSL_TOKENS = 5
"""The answer to a prompt whose TTFT is measured."""

FULLEST = 0.95
"""The part of the KV cache that is filled at most: engines keep some blocks back when they admit requests."""

BLOCK_TOKENS = 64
"""What the KV of a request is rounded up to: the largest block that is usual."""

LEAST_ANSWER_TOKENS = 128
"""So long are answers at least, where ``osl_tokens`` allows: all of a load must decode at the same time."""

SELECTION_CONCURRENCIES = (1, 5, 10, 25, *range(50, 501, 50))


class DecodeLoad(NamedTuple):
    """So many requests at the same time, each with such a prompt (in the prefix cache) and such an answer."""

    isl_tokens: int
    osl_tokens: int
    concurrency: int


def tensor_parallel_sizes(gpus: int) -> tuple[int, ...]:
    """The powers of two that so many GPUs allow, rising; raises ConfigError when there is no GPU."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs to profile on", hint="expected at least 1")
    return tuple(2**exponent for exponent in range(gpus.bit_length()))


def prefill_lengths(max_context_tokens: int, granularity: int) -> tuple[int, ...]:
    """One prompt length more than ``granularity``, evenly spread up to the context; rising, all different.

    Raises ConfigError when the context does not hold so many, or they are too few for a curve.
    """
    if granularity < 3:
        raise ConfigError(
            f"prefill-interpolation-granularity is {granularity}",
            hint="expected at least 3: a cubic curve goes through four lengths",
        )
    longest = max_context_tokens - PREFILL_OSL_TOKENS
    if longest <= granularity:
        raise ConfigError(
            f"max-context-length is {max_context_tokens}",
            hint=f"expected more than {granularity + PREFILL_OSL_TOKENS}: {granularity + 1} prompt lengths",
        )
    shortest = min(SHORTEST_TOKENS, longest // (granularity + 1))
    return tuple(shortest + (longest - shortest) * i // granularity for i in range(granularity + 1))


def decode_points(
    max_context_tokens: int,
    max_kv_tokens: int,
    granularity: int,
    osl_tokens: int,
    request_slots: int | None = None,
) -> tuple[DecodeLoad, ...]:
    """Up to ``granularity + 1`` prompt lengths, with as many concurrencies each, from 1 to what the KV holds.

    Unlike the original's even ones, lengths grow by a constant factor, and concurrencies with the square:
    at a given KV usage the batch is inverse to the context, and ITL bends where batches are small. Answers
    are a quarter of their prompts, or 128 tokens, and at most ``osl_tokens`` and half of what fits: prompts
    fill the KV cache from the first token on, so that high usages are measured too.
    No more than ``request_slots`` run at once. Raises ConfigError when the engine holds no request.
    """
    if granularity < 1:
        raise ConfigError(f"decode-interpolation-granularity is {granularity}", hint="expected at least 1")
    room = min(max_context_tokens, int(max_kv_tokens * FULLEST))
    if room < 2:
        raise ConfigError(
            f"max-context-length is {max_context_tokens}, the KV cache holds {max_kv_tokens} tokens",
            hint="expected room in both for a prompt and an answer",
        )
    longest_answer = min(osl_tokens, room // 2)
    longest = room - longest_answer
    loads = []
    for isl_tokens in _geometric(min(SHORTEST_TOKENS, longest), longest, granularity):
        answer = min(longest_answer, max(LEAST_ANSWER_TOKENS, isl_tokens // 4))
        most = _most_concurrent(max_kv_tokens, isl_tokens + answer, request_slots)
        loads += [DecodeLoad(isl_tokens, answer, each) for each in _squares(most, granularity)]
    return tuple(loads)


def selection_concurrencies(
    max_kv_tokens: int, isl_tokens: int, osl_tokens: int, request_slots: int | None = None
) -> tuple[int, ...]:
    """How many requests of the target's lengths at once: 1, 5, 10, 25, 50 and so on, and what the KV holds.

    Raises ConfigError when it does not hold one.
    """
    tokens = isl_tokens + osl_tokens
    if max_kv_tokens < tokens:
        raise ConfigError(
            f"isl is {isl_tokens} and osl {osl_tokens}, but the KV cache holds {max_kv_tokens} tokens",
            hint="expected a prompt and its answer to fit in it together",
        )
    most = _most_concurrent(max_kv_tokens, tokens, request_slots)
    return _rising(each for each in (*SELECTION_CONCURRENCIES, most) if each <= most)


def _most_concurrent(max_kv_tokens: int, tokens: int, request_slots: int | None) -> int:
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    most = max(1, int(max_kv_tokens * FULLEST) // (blocks * BLOCK_TOKENS))
    return most if request_slots is None else max(1, min(most, request_slots))


def _geometric(first: int, last: int, steps: int) -> tuple[int, ...]:
    return _rising(round(first * (last / first) ** (i / steps)) for i in range(steps + 1))


def _squares(most: int, steps: int) -> tuple[int, ...]:
    return _rising(1 + round((most - 1) * (i / steps) ** 2) for i in range(steps + 1))


def _rising(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
