"""The options of the simulated engine: defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.timing_model.settings import EngineSettings
from dynaplan.util.errors import ConfigError


def test_an_empty_section_means_the_documented_defaults() -> None:
    options = SimOptions.from_options({})
    settings = EngineSettings.of(options, 945_029)
    assert (settings.block_tokens, settings.context_tokens, settings.total_blocks) == (16, 16_384, 59_064)
    assert (settings.batched_tokens, settings.request_slots, settings.is_prefix_caching) == (8192, 256, True)
    assert (options.speedup_ratio, options.startup_time_s, settings.jitter, settings.seed) == (
        1.0,
        0.0,
        0.0,
        0,
    )


def test_options_of_others_are_left_alone() -> None:
    assert SimOptions.from_options({"remote-prefill": True, "kv-transfer-config": "{}"}) == SimOptions()


def test_the_block_override_wins_over_kv_tokens_and_bounds_the_default_context() -> None:
    section = {"num-gpu-blocks-override": 100, "kv-total-tokens": 9, "block-size": 32}
    settings = EngineSettings.of(SimOptions.from_options(section), 945_029)
    assert (settings.total_blocks, settings.context_tokens) == (100, 3200)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("model", 7),
        ("profile", " "),
        ("block-size", 0),
        ("block-size", "16"),
        ("max-model-len", -1),
        ("max-num-batched-tokens", 1.5),
        ("max-num-seqs", True),
        ("enable-prefix-caching", 1),
        ("tensor-parallel-size", 0),
        ("num-gpu-blocks-override", 0),
        ("kv-total-tokens", -5),
        ("speedup-ratio", -1),
        ("speedup-ratio", float("nan")),
        ("startup-time", "soon"),
        ("seed", -1),
        ("jitter", 0.9),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_was_expected(key: str, value: Any) -> None:
    assert key in options_of(SimOptions)
    with pytest.raises(ConfigError) as refusal:
        SimOptions.from_options({key: value})
    assert key in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert "Expected" in str(refusal.value)


def test_a_budget_below_the_number_of_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-num-batched-tokens is 100"):
        SimOptions.from_options({"max-num-batched-tokens": 100})


def test_a_context_that_does_not_fit_the_kv_cache_is_refused() -> None:
    options = SimOptions.from_options({"max-model-len": 4096, "num-gpu-blocks-override": 100})
    with pytest.raises(ConfigError, match="max-model-len is 4096"):
        EngineSettings.of(options, 945_029)
