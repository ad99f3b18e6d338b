"""The loads that a profiling sweep puts on an engine.

Source: Dynamo's profile_sla (0.2 to 0.9), unless noted.

Lengths and concurrencies are spread over everything that the engine can hold, never beyond: a request that
waits for KV or for a slot would be measured as one that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dynaplan.util.errors import ConfigError

MIN_PROMPT_TOKENS = 100
"""The shortest prompt that is measured, in tokens, if the context has room for it."""

PREFILL_OSL_TOKENS = 5
"""The length of the answer to a prompt whose TTFT is measured."""

MAX_KV_USAGE = 0.95
"""The part of the KV cache that is filled at most: engines keep some blocks back when they admit requests."""

BLOCK_TOKENS = 64
"""The unit that the KV entries of a request are rounded up to: the largest usual block."""

MIN_ANSWER_TOKENS = 128
"""The least length of answers if ``osl_tokens`` allows it: all requests of a load must decode together."""

SELECTION_CONCURRENCIES = (1, 5, 10, 25, *range(50, 501, 50))
"""The numbers of simultaneous requests that sizes are compared by, as in the original."""


class DecodeLoad(NamedTuple):
    """``concurrency`` simultaneous requests of these lengths, their prompts in the prefix cache."""

    isl_tokens: int
    osl_tokens: int
    concurrency: int


def tensor_parallel_sizes(gpus: int) -> tuple[int, ...]:
    """Return the powers of two up to the number of GPUs, rising; raises ConfigError when there is no GPU."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs to profile on", hint="Expected at least 1.")
    return tuple(2**exponent for exponent in range(gpus.bit_length()))


def prefill_lengths(max_context_tokens: int, granularity: int) -> tuple[int, ...]:
    """Return ``granularity + 1`` prompt lengths, spread evenly up to the context; rising, all different.

    Raises ConfigError when the context is too short for them, or they are too few for a curve.
    """
    if granularity < 3:
        raise ConfigError(
            f"prefill-interpolation-granularity is {granularity}",
            hint="Expected at least 3: a cubic curve goes through four lengths.",
        )
    longest = max_context_tokens - PREFILL_OSL_TOKENS
    if longest <= granularity:
        raise ConfigError(
            f"max-context-length is {max_context_tokens}",
            hint=f"Expected more than {granularity + PREFILL_OSL_TOKENS}: {granularity + 1} prompt lengths.",
        )
    shortest = min(MIN_PROMPT_TOKENS, longest // (granularity + 1))
    return tuple(shortest + (longest - shortest) * i // granularity for i in range(granularity + 1))


def decode_points(
    max_context_tokens: int,
    max_kv_tokens: int,
    granularity: int,
    osl_tokens: int,
    request_slots: int | None = None,
) -> tuple[DecodeLoad, ...]:
    """Return a grid of loads: up to ``granularity + 1`` prompt lengths with as many concurrencies each.

    Concurrencies go from 1 to the number that the KV cache holds, and never beyond ``request_slots``. Unlike
    in Dynamo's profiler, where both are spread evenly, lengths grow by a constant factor and concurrencies
    with the square: at a given KV usage the batch is inverse to the context, and ITL bends at small batches.
    Answers have a quarter of their prompts' length, or 128 tokens, and at most ``osl_tokens`` and half of
    what one request may hold: prompts fill the KV cache from the first token on, so that high usages are
    measured too. Raises
    ConfigError when the engine holds no request.
    """
    if granularity < 1:
        raise ConfigError(f"decode-interpolation-granularity is {granularity}", hint="Expected at least 1.")
    room = min(max_context_tokens, int(max_kv_tokens * MAX_KV_USAGE))
    if room < 2:
        raise ConfigError(
            f"max-context-length is {max_context_tokens}, the KV cache holds {max_kv_tokens} tokens",
            hint="Expected room in both for a prompt and an answer.",
        )
    longest_answer = min(osl_tokens, room // 2)
    longest = room - longest_answer
    loads = []
    for isl_tokens in _geometric(min(MIN_PROMPT_TOKENS, longest), longest, granularity):
        answer = min(longest_answer, max(MIN_ANSWER_TOKENS, isl_tokens // 4))
        most = _most_concurrent(max_kv_tokens, isl_tokens + answer, request_slots)
        loads += [DecodeLoad(isl_tokens, answer, each) for each in _squares(most, granularity)]
    return tuple(loads)


def selection_concurrencies(
    max_kv_tokens: int, isl_tokens: int, osl_tokens: int, request_slots: int | None = None
) -> tuple[int, ...]:
    """Return the concurrencies to compare sizes by: 1, 5, 10, 25, 50 and so on, and the most that fit.

    Raises ConfigError when the KV cache does not hold one request of these lengths.
    """
    tokens = isl_tokens + osl_tokens
    if max_kv_tokens < tokens:
        raise ConfigError(
            f"isl is {isl_tokens} and osl {osl_tokens}, but the KV cache holds {max_kv_tokens} tokens",
            hint="Expected a prompt and its answer to fit in it together.",
        )
    most = _most_concurrent(max_kv_tokens, tokens, request_slots)
    return _ascending(each for each in (*SELECTION_CONCURRENCIES, most) if each <= most)


def _most_concurrent(max_kv_tokens: int, tokens: int, request_slots: int | None) -> int:
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    most = max(1, int(max_kv_tokens * MAX_KV_USAGE) // (blocks * BLOCK_TOKENS))
    return most if request_slots is None else max(1, min(most, request_slots))


def _geometric(first: int, last: int, steps: int) -> tuple[int, ...]:
    return _ascending(round(first * (last / first) ** (i / steps)) for i in range(steps + 1))


def _squares(most: int, steps: int) -> tuple[int, ...]:
    return _ascending(1 + round((most - 1) * (i / steps) ** 2) for i in range(steps + 1))


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
