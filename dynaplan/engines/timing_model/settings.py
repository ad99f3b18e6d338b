"""The sizes of a modelled engine: the simulated engine's options, completed by its profile."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.config.settings.worker import EngineOptions, SimOptions
from dynaplan.util.errors import ConfigError

DEFAULT_CONTEXT_TOKENS = 16_384
"""The context where no option says it and the KV cache holds as much."""


@dataclass(frozen=True)
class EngineSettings:
    """The sizes of an engine, in tokens unless the name says blocks.

    Each step's duration is multiplied by a factor drawn evenly from ``1 - jitter`` to ``1 + jitter``.
    """

    total_blocks: int
    block_tokens: int = EngineOptions.block_tokens
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    batched_tokens: int = EngineOptions.batched_tokens
    request_slots: int = EngineOptions.request_slots
    is_prefix_caching: bool = True
    jitter: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, options: SimOptions, profile_kv_tokens: int) -> EngineSettings:
        """Fill in the KV size and the context; raise ConfigError when the context does not fit."""
        kv_tokens = options.total_kv_tokens or profile_kv_tokens
        total_blocks = options.total_blocks or max(kv_tokens // options.block_tokens, 1)
        kv_tokens = total_blocks * options.block_tokens
        if options.context_tokens > kv_tokens:
            raise ConfigError(
                f"max-model-len is {options.context_tokens}, but the KV cache holds {kv_tokens} tokens",
                hint="Expected at most num-gpu-blocks-override times block-size, or kv-total-tokens.",
            )
        return cls(
            total_blocks=total_blocks,
            block_tokens=options.block_tokens,
            context_tokens=options.context_tokens or min(DEFAULT_CONTEXT_TOKENS, kv_tokens),
            batched_tokens=options.batched_tokens,
            request_slots=options.request_slots,
            is_prefix_caching=options.is_prefix_caching,
            jitter=options.jitter,
            seed=options.seed,
        )

    def blocks_for(self, tokens: int) -> int:
        """The KV blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)
