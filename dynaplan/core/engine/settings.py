"""The options of the simulated engine: names and meaning as vLLM's, plus the simulation's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dynaplan.domain.errors import ConfigError

DEFAULT_MODEL = "nvidia/Llama-3.1-8B-Instruct-FP8"
DEFAULT_CONTEXT_TOKENS = 16_384

ENGINE_OPTIONS = frozenset(
    {
        "model",
        "block-size",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "enable-prefix-caching",
        "tensor-parallel-size",
        "num-gpu-blocks-override",
        "kv-total-tokens",
        "speedup-ratio",
        "startup-time",
        "seed",
        "jitter",
        "profile",
    }
)
"""Every option the simulated engine reads; others in its section are somebody else's."""


@dataclass(frozen=True)
class EngineSettings:
    """What the engine model needs to know; sizes in tokens unless the name says blocks.

    Each step's duration is multiplied by a factor drawn evenly from ``1 - jitter`` to ``1 + jitter``.
    """

    total_blocks: int
    block_tokens: int = 16
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    batched_tokens: int = 8192
    request_slots: int = 256
    is_prefix_caching: bool = True
    jitter: float = 0.0
    seed: int = 0

    def blocks_for(self, tokens: int) -> int:
        """The KV blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class SimOptions:
    """The simulated engine's section of the configuration, checked. 0 blocks or KV tokens: the profile's.

    ``speedup_ratio`` divides every simulated time; 0 means no delays at all. ``profile`` is empty
    (chosen by model), a name, or a path.
    """

    model: str = DEFAULT_MODEL
    profile: str = ""
    tensor_parallel_size: int = 1
    block_tokens: int = 16
    context_tokens: int = 0
    batched_tokens: int = 8192
    request_slots: int = 256
    is_prefix_caching: bool = True
    total_blocks: int = 0
    total_kv_tokens: int = 0
    jitter: float = 0.0
    seed: int = 0
    speedup_ratio: float = 1.0
    startup_time_s: float = 0.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SimOptions:
        """Check the section's values; raises ConfigError naming key, value and what was expected."""
        model = _text(options, "model", DEFAULT_MODEL)
        checked = cls(
            model=model,
            profile=_text(options, "profile", ""),
            tensor_parallel_size=_whole(options, "tensor-parallel-size", 1, 1),
            block_tokens=_whole(options, "block-size", 16, 1),
            context_tokens=_whole(options, "max-model-len", 0, 1),
            batched_tokens=_whole(options, "max-num-batched-tokens", 8192, 1),
            request_slots=_whole(options, "max-num-seqs", 256, 1),
            is_prefix_caching=_flag(options, "enable-prefix-caching", True),
            total_blocks=_whole(options, "num-gpu-blocks-override", 0, 1),
            total_kv_tokens=_whole(options, "kv-total-tokens", 0, 1),
            jitter=_number(options, "jitter", 0.0, 0.5),
            seed=_whole(options, "seed", 0, 0),
            speedup_ratio=_number(options, "speedup-ratio", 1.0, 1e9),
            startup_time_s=_number(options, "startup-time", 0.0, 86_400.0),
        )
        if checked.batched_tokens < checked.request_slots:
            raise ConfigError(
                f"max-num-batched-tokens is {checked.batched_tokens}, max-num-seqs {checked.request_slots}",
                hint="expected the first to be no less than the second, for one token of each per step",
            )
        return checked

    def settings(self, profile_kv_tokens: int) -> EngineSettings:
        """The model's settings, KV size and context filled in; ConfigError when the context does not fit."""
        kv_tokens = self.total_kv_tokens or profile_kv_tokens
        total_blocks = self.total_blocks or max(kv_tokens // self.block_tokens, 1)
        kv_tokens = total_blocks * self.block_tokens
        if self.context_tokens > kv_tokens:
            raise ConfigError(
                f"max-model-len is {self.context_tokens}, but the KV cache holds {kv_tokens} tokens",
                hint="expected at most num-gpu-blocks-override times block-size, or kv-total-tokens",
            )
        return EngineSettings(
            total_blocks=total_blocks,
            block_tokens=self.block_tokens,
            context_tokens=self.context_tokens or min(DEFAULT_CONTEXT_TOKENS, kv_tokens),
            batched_tokens=self.batched_tokens,
            request_slots=self.request_slots,
            is_prefix_caching=self.is_prefix_caching,
            jitter=self.jitter,
            seed=self.seed,
        )


CONCURRENT_PREFILLS = 4
"""How many requests a prefill worker holds at once, unless ``max-concurrent-prefills`` says otherwise.

Prefill is bound by computation, so batching short prompts is all there is to gain: four keep the engine
from idling between two. What one worker takes, one that was just added can no longer relieve it of.
"""


def concurrent_prefills(options: Mapping[str, Any]) -> int:
    """The ``max-concurrent-prefills`` of a prefill worker's section; ConfigError for a wrong one."""
    return _whole(options, "max-concurrent-prefills", CONCURRENT_PREFILLS, 1)


Value = TypeVar("Value")


def _given(options: Mapping[str, Any], key: str, default: Value) -> Any | Value:
    value = options.get(key)
    return default if value is None else value


def _wrong(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}", hint=f"expected {expected}")


def _text(options: Mapping[str, Any], key: str, default: str) -> str:
    value = _given(options, key, default)
    if not isinstance(value, str) or (options.get(key) is not None and not value.strip()):
        raise _wrong(key, value, "a text that is not empty")
    return value


def _whole(options: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = options.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise _wrong(key, value, f"a whole number, at least {least}")
    return value


def _number(options: Mapping[str, Any], key: str, default: float, most: float) -> float:
    value = _given(options, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= most:
        raise _wrong(key, value, f"a number from 0 to {most:g}")
    return float(value)


def _flag(options: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _given(options, key, default)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value
