"""Which loads a sweep puts on an engine: the reference's, without its crashes on small engines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.lab.profiling.load_points import (
    BLOCK_TOKENS,
    PREFILL_OSL_TOKENS,
    decode_points,
    prefill_lengths,
    selection_concurrencies,
    tensor_parallel_sizes,
)
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2)), (6, (1, 2, 4)), (8, (1, 2, 4, 8))]
)
def test_tensor_parallel_sizes_are_the_powers_of_two_that_the_box_allows(
    gpus: int, sizes: tuple[int, ...]
) -> None:
    assert tensor_parallel_sizes(gpus) == sizes


def test_without_a_gpu_there_is_nothing_to_profile() -> None:
    with pytest.raises(ConfigError, match="0 GPUs"):
        tensor_parallel_sizes(0)


def test_prompt_lengths_go_evenly_from_100_to_what_the_context_holds() -> None:
    lengths = prefill_lengths(16_384, 16)
    assert len(lengths) == 17
    assert (lengths[0], lengths[-1]) == (100, 16_379)
    assert {right - left for left, right in pairwise(lengths)} <= {1017, 1018}


@given(context=st.integers(1, 40_000), granularity=st.integers(3, 64))
def test_prompt_lengths_are_all_different_and_leave_room_for_the_answer_or_there_are_none(
    context: int, granularity: int
) -> None:
    if context <= granularity + PREFILL_OSL_TOKENS:
        with pytest.raises(ConfigError, match=f"max-context-length is {context}"):
            prefill_lengths(context, granularity)
        return
    lengths = prefill_lengths(context, granularity)
    assert len(set(lengths)) == granularity + 1
    assert list(lengths) == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] + PREFILL_OSL_TOKENS == context


def test_too_few_prompt_lengths_for_a_curve_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill-interpolation-granularity is 2"):
        prefill_lengths(16_384, 2)


@given(
    context=st.integers(1, 40_000),
    kv=st.integers(1, 2_000_000),
    granularity=st.integers(1, 12),
    osl=st.integers(1, 1000),
    slots=st.none() | st.integers(1, 1024),
)
def test_no_decode_load_is_more_than_the_engine_holds(
    context: int, kv: int, granularity: int, osl: int, slots: int | None
) -> None:
    try:
        loads = decode_points(context, kv, granularity, osl, slots)
    except ConfigError:
        assert min(context, int(kv * 0.95)) < 2
        return
    assert len(set(loads)) == len(loads) <= (granularity + 1) ** 2
    for load in loads:
        assert 1 <= load.isl_tokens <= context - load.osl_tokens
        assert 1 <= load.osl_tokens <= osl
        assert load.concurrency == 1 or load.concurrency * (load.isl_tokens + load.osl_tokens) <= kv
        assert slots is None or load.concurrency <= slots


def test_decode_loads_reach_from_one_request_to_a_nearly_full_cache_at_every_prompt_length() -> None:
    loads = decode_points(16_384, 400_000, 6, 500)
    by_length: dict[int, list[int]] = {load.isl_tokens: [] for load in loads}
    fullest = dict.fromkeys(by_length, 0)
    for load in loads:
        by_length[load.isl_tokens].append(load.concurrency)
        tokens = load.concurrency * (load.isl_tokens + load.osl_tokens + BLOCK_TOKENS)
        fullest[load.isl_tokens] = max(fullest[load.isl_tokens], tokens)
    assert len(by_length) == 7
    assert all(concurrencies[0] == 1 and len(concurrencies) == 7 for concurrencies in by_length.values())
    assert min(fullest.values()) > 0.9 * 400_000


def test_answers_are_shortened_to_what_a_small_context_holds() -> None:
    assert max(decode_points(400, 400_000, 6, 500)).isl_tokens == 200
    assert {load.isl_tokens + load.osl_tokens <= 400 for load in decode_points(400, 400_000, 6, 500)} == {
        True
    }


def test_an_engine_that_holds_no_prompt_and_answer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max-context-length is 1"):
        decode_points(1, 400_000, 6, 500)
    with pytest.raises(ConfigError, match="the KV cache holds 2 tokens"):
        decode_points(16_384, 2, 6, 500)


def test_concurrencies_for_the_target_are_the_reference_s_and_the_most_that_fits() -> None:
    assert selection_concurrencies(10**9, 3000, 500, 500) == (1, 5, 10, 25, *range(50, 501, 50))
    assert selection_concurrencies(110_000, 3000, 500) == (1, 5, 10, 25, 29)
    assert selection_concurrencies(110_000, 3000, 500, request_slots=8) == (1, 5, 8)


def test_an_engine_that_holds_one_request_is_measured_with_one() -> None:
    assert selection_concurrencies(3500, 3000, 500) == (1,)


def test_an_engine_that_holds_no_request_of_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="isl is 3000 and osl 500, but the KV cache holds 3499 tokens"):
        selection_concurrencies(3499, 3000, 500)


def test_an_engine_that_holds_no_prompt_and_answer_cannot_be_swept() -> None:
    with pytest.raises(ConfigError, match="the KV cache holds 1 tokens"):
        decode_points(4096, 1, 4, 500)


def test_a_sweep_of_no_points_is_refused() -> None:
    with pytest.raises(ConfigError, match="granularity is 0"):
        decode_points(4096, 10_000, 0, 500)
