"""Prompts as the engines' KV blocks: cut into tokens by the model's own tokenizer where that is known.

A model's chat template is downloaded code, and long prompts take time: neither may hold up the frontend, so
each model has a tokenizing process (``tokenizer_main``). No request waits long for it. A process that makes
no progress is killed, and one that has ended is started again, after growing pauses.

Without tokens a prompt's text is cut by an estimate. Such blocks serve for predictions; engines do not know
them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dynaplan.engines.model_files import DIRECTORY, model_kind
from dynaplan.engines.timing_model.kv_blocks import TOKEN_BYTES, block_hashes, packed_block_hashes
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.tokenizer_files import model_directory
from dynaplan.gateway.openai_api import Call, PromptBlocks
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

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
    def of(self, card: Mapping[str, Any]) -> Tokenizer | None:
        """Return the tokenizer of the worker with that card; None where there is none."""
        ...

    def fault(self, card: Mapping[str, Any]) -> str:
        """Return the reason why there are no tokens for the worker with that card; empty when there are."""
        ...


def block_tokens_of(card: Mapping[str, Any]) -> int:
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


PACKAGES = ("tokenizers", "jinja2")
"""The packages that tokenizing needs: those of the extra ``kv``."""


class ModelTokenizers:
    """Finds the tokenizer of a worker's model by its card, and the reason where there is none."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._processes: dict[tuple[str, str], TokenizingProcess | None] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def of(self, card: Mapping[str, Any]) -> Tokenizer | None:
        """Return the tokenizer of the worker with that card, started; None where there is none."""
        key = _key(card)
        if key not in self._processes:
            self._processes[key] = self._find(card, key)
        return self._processes[key]

    def fault(self, card: Mapping[str, Any]) -> str:
        """Return the reason why there are no tokens for the worker with that card; empty when there are."""
        self.of(card)
        key = _key(card)
        process = self._processes[key]
        return process.fault if process else self._reasons[key]

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._processes.values() if each))

    def _find(self, card: Mapping[str, Any], key: tuple[str, str]) -> TokenizingProcess | None:
        model, template = key
        reason = ""
        if model_kind(str(card.get("engine"))) != DIRECTORY:  # a GGUF file brings its tokenizer along
            reason = f"engine {card.get('engine')} has a tokenizer of its own"
        elif missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            reason = f"{missing[0]} is not installed; pip install {' '.join(PACKAGES)}"
        elif (directory := model_directory(model, self._environment)) is None:
            reason = f"there is no tokenizer.json of {model} on this host"
        else:
            process = TokenizingProcess(directory, template)
            process.start()
            return process
        log.info("no tokens of %s: %s; routing by prediction", model, reason)
        self._reasons[key] = reason
        return None


def _key(card: Mapping[str, Any]) -> tuple[str, str]:
    return str(card.get("tokenizer") or ""), str(card.get("chat_template") or "")


MAIN = "dynaplan.gateway.kv_routing.tokenizer_main"
"""The module that the process runs."""


LIMITS = HelperLimits(
    answer_s=10.0,
    memory_bytes=6 * 1024**3,  # the tokenizer of 200,000 words takes about 300 MB
    restart_s=(1.0, 5.0, 30.0, 300.0),
)

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bodies that wait for the process at most, in bytes; what would exceed them has no tokens."""


class TokenizingProcess:
    """Tokenises the prompts of the model in that directory; ``template`` stands for its own chat template."""

    def __init__(self, directory: Path, template: str = "") -> None:
        self._directory = directory
        self._helper = HelperProcess(MAIN, (str(directory), template), LIMITS)
        self._tasks = BackgroundTasks()
        self._waiting_bytes = 0
        self._is_starting = False
        self._fault = "it is being read"

    @property
    def fault(self) -> str:
        """The reason why there are no tokens; empty while there are."""
        return self._fault or ("" if self._helper.pid else "its process has ended")

    def start(self) -> None:
        """Start the process, unless it runs, or has ended a moment ago."""
        if not self._helper.pid and self._helper.can_be_asked and not self._is_starting:
            self._is_starting, self._fault = True, self.fault
            self._tasks.spawn(self._read_model(), "tokenizer")

    async def blocks(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        """Return the prompt's blocks; None when its tokens cannot be known, or not in time."""
        self.start()
        if not self._helper.pid or self._waiting_bytes + len(call.body) > MAX_WAITING_BYTES:
            return None
        answer = self._tasks.spawn(self._ask(call, block_tokens), "prompt")
        done, _ = await asyncio.wait((answer,), timeout=timing.TOKENS_TIMEOUT_S)
        return answer.result() if done else None

    async def close(self) -> None:
        """End the process; return when it is gone."""
        await self._helper.close()
        await self._tasks.cancel()

    async def _read_model(self) -> None:
        """Start the process, and note whether it could read the model."""
        try:
            answer, _ = await self._helper.ask({})
        except HelperFailed as failure:
            self._report_failure(failure)
            return
        finally:
            self._is_starting = False
        self._fault = str(answer.get("error", ""))
        if self._fault:
            log.warning("no tokens of %s: %s; routing by prediction", self._directory, self._fault)

    async def _ask(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        question = {"block_tokens": block_tokens, "is_chat": call.endpoint.is_chat}
        self._waiting_bytes += len(call.body)
        try:
            answer, hashes = await self._helper.ask(question, call.body)
        except HelperFailed as failure:
            self._report_failure(failure)
            return None
        finally:
            self._waiting_bytes -= len(call.body)
        return self._blocks_of(answer, hashes, block_tokens)

    def _blocks_of(self, answer: dict[str, Any], hashes: bytes, block_tokens: int) -> PromptBlocks | None:
        if reason := answer.get("error"):
            log.debug("a prompt is not tokenized: %s", reason)
            return None
        return PromptBlocks(tuple(array("Q", hashes)), block_tokens, answer["tokens"])

    def _report_failure(self, failure: HelperFailed) -> None:
        if not self._fault:
            self._fault = str(failure)
            log.warning("no tokens of %s: %s; routing by prediction", self._directory, failure)
