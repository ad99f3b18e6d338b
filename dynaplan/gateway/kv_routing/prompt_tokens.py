"""Prompts as the engines' KV blocks: cut into tokens by the model's own tokenizer where that is known.

Without one a prompt's text is cut by an estimate. Such blocks do to remember what was sent where; engines
do not know them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from dynaplan.engines.timing_model.kv_blocks import TOKEN_BYTES, block_hashes, packed_block_hashes
from dynaplan.gateway.openai_api import Call, PromptBlocks

DEFAULT_BLOCK_TOKENS = 16
"""Tokens in a KV block of a worker whose card does not state it."""

BLOCKS_AT_ONCE = 4096
"""Blocks of a text that are hashed without a pause: about 3 ms."""

SIMULATED = "sim"
"""The tokenizer of the simulated engine's card: four bytes are one token."""


class Tokenizer(Protocol):
    """Cuts requests into tokens as one model's engine does."""

    async def blocks(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        """Return the prompt's blocks; None when its tokens cannot be known, or not in time."""
        ...


class Tokenizers(Protocol):
    """The tokenizers of the workers' models."""

    def of(self, card: Mapping[str, Any]) -> Tokenizer | None:
        """Return the tokenizer of the worker with that card; None where there is none."""
        ...

    def fault(self, card: Mapping[str, Any]) -> str:
        """Return the reason why there are no tokens for the worker with that card; empty when there are."""
        ...


def block_tokens_of(card: Mapping[str, Any]) -> int:
    """Return the tokens in a KV block of the worker with that card."""
    stated = card.get("kv_block_tokens")
    return stated if isinstance(stated, int) and stated > 0 else DEFAULT_BLOCK_TOKENS


async def prompt_blocks(call: Call, card: Mapping[str, Any], tokenizers: Tokenizers | None) -> PromptBlocks:
    """Return the blocks of a prompt as a worker with that card cuts it, else by an estimate."""
    block_tokens = block_tokens_of(card)
    if call.model in (card.get("loras") or ()):
        text = call.prompt if isinstance(call.prompt, str) else str(call.prompt)
        # KV entries of an adapter are not those of its model, nor of another adapter.
        return PromptBlocks(await _text_hashes(f"{call.model}\n{text}", block_tokens), block_tokens)
    if call.endpoint.inputs:
        return PromptBlocks(await _text_hashes(call.prompt_text, block_tokens), block_tokens)
    if not isinstance(call.prompt, str):
        return PromptBlocks(tuple(block_hashes(call.prompt, block_tokens)), block_tokens, call.prompt_tokens)
    if card.get("tokenizer") == SIMULATED:
        hashes = await _text_hashes(call.prompt, block_tokens)
        return PromptBlocks(hashes, block_tokens, call.prompt_tokens)
    is_plain = not call.has_media and call.prompts == 1
    tokenizer = tokenizers.of(card) if tokenizers and is_plain else None
    blocks = await tokenizer.blocks(call, block_tokens) if tokenizer else None
    return blocks or PromptBlocks(await _text_hashes(call.prompt, block_tokens), block_tokens)


def token_fault(card: Mapping[str, Any], tokenizers: Tokenizers | None) -> str:
    """Return the reason why a worker's prompts cannot be cut into its tokens; empty when they can."""
    if card.get("tokenizer") == SIMULATED:
        return ""
    return tokenizers.fault(card) if tokenizers else "its tokenizer is not known"


async def _text_hashes(text: str, block_tokens: int) -> tuple[int, ...]:
    """Return the hashes of a text's blocks, in the simulated engine's tokens: equal in every process.

    Between two slices of a long text others get their turn.
    """
    encoded = text.encode("utf-8", "replace")
    padded = encoded + bytes(-len(encoded) % TOKEN_BYTES)
    slice_bytes = BLOCKS_AT_ONCE * block_tokens * TOKEN_BYTES
    hashes = packed_block_hashes(padded[:slice_bytes], block_tokens)
    for begin in range(slice_bytes, len(padded), slice_bytes):
        await asyncio.sleep(0)
        hashes += packed_block_hashes(padded[begin : begin + slice_bytes], block_tokens, hashes[-1])
    return tuple(hashes)
