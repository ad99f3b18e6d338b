"""The memory of KV entries and weights, against numbers that others have published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines.timing_model.kv_memory import TYPE_BYTES, KvShape, MemoryNeed, longest_context

LLAMA_3_8B = KvShape((8,) * 32, 128, 128)


def test_a_token_of_llama_3_8b_takes_128_kib_and_half_of_it_in_8_bits() -> None:
    """The figure of Dynamo's mocker (engines/timing_model/hand_off.py), and of Llama 3.1's model card."""
    assert LLAMA_3_8B.bytes_per_token() == 128 * 1024
    assert LLAMA_3_8B.bytes_per_token(1, 1) == 64 * 1024
    assert KvShape((32,) * 32, 128, 128).bytes_per_token() == 512 * 1024, "Llama 2 7B: no GQA"


def test_layers_may_have_different_numbers_of_heads() -> None:
    assert KvShape((8, 0, 4), 64, 32).bytes_per_token(2, 1) == 12 * (64 * 2 + 32)


def test_mla_keeps_one_latent_vector_per_layer() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 values in 16 bit are 70,272 bytes (DeepSeek's report: 70 kB)."""
    assert KvShape((128,) * 61, 192, 128, latent_dim=576).bytes_per_token() == 70_272


def test_quantised_types_have_the_bytes_of_their_blocks() -> None:
    assert TYPE_BYTES["q8_0"] == 1.0625
    assert TYPE_BYTES["q4_0"] == 0.5625


def test_a_worker_needs_its_weights_and_the_entries_of_all_its_requests() -> None:
    need = MemoryNeed(1000, 10, 300, sequences=4)
    assert (need.kv_bytes, need.total_bytes) == (12_000, 13_000)


@pytest.mark.parametrize(
    ("kv_bytes", "token_bytes", "fits"),
    [(20_480, 40, 512), (20_479, 40, 256), (10_000, 40, 0), (-5, 40, 0), (10**9, 0, 0)],
)
def test_the_longest_context_that_fits(kv_bytes: float, token_bytes: float, fits: int) -> None:
    assert longest_context(kv_bytes, token_bytes) == fits


@given(st.floats(0, 1e13), st.floats(1, 1e6))
def test_what_is_said_to_fit_fits(kv_bytes: float, token_bytes: float) -> None:
    assert longest_context(kv_bytes, token_bytes) * token_bytes <= kv_bytes * (1 + 1e-9)
