"""The tokenising process of one model, as the frontend sees it; ``process_main`` is its other side.

Many questions may be under way, and no request waits long for its own: without tokens a router predicts. A
process that does not come on with a question is killed, and one that has ended is started again, later each
time.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from pathlib import Path
from typing import Any

from dynaplan.gateway.openai_api import Call, PromptBlocks
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

MAIN = "dynaplan.gateway.kv_routing.tokens.process_main"
"""The module that the process runs."""

WAIT_S = 1.0
"""Time that a request waits for its tokens; a prompt of a million tokens takes about a second."""

LIMITS = HelperLimits(
    answer_s=10.0,
    memory_bytes=6 * 1024**3,  # the tokenizer of 200,000 words takes about 300 MB
    restart_s=(1.0, 5.0, 30.0, 300.0),
)

MOST_WAITING_BYTES = 64 * 1024 * 1024
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
        """The reason why there are no tokens; empty while they come."""
        return self._fault or ("" if self._helper.pid else "its process has ended")

    def start(self) -> None:
        """Start the process, unless it runs, or has ended a moment ago."""
        if not self._helper.pid and self._helper.can_be_asked and not self._is_starting:
            self._is_starting, self._fault = True, self.fault
            self._tasks.spawn(self._read_model(), "tokenizer")

    async def blocks(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        """Return the prompt's blocks; None when its tokens cannot be known, or not in time."""
        self.start()
        if not self._helper.pid or self._waiting_bytes + len(call.body) > MOST_WAITING_BYTES:
            return None
        answer = self._tasks.spawn(self._asked(call, block_tokens), "prompt")
        done, _ = await asyncio.wait((answer,), timeout=WAIT_S)
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
            self._note(failure)
            return
        finally:
            self._is_starting = False
        self._fault = str(answer.get("error", ""))
        if self._fault:
            log.warning("no tokens of %s: %s; routing by prediction", self._directory, self._fault)

    async def _asked(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        question = {"block_tokens": block_tokens, "is_chat": call.endpoint.is_chat}
        self._waiting_bytes += len(call.body)
        try:
            answer, hashes = await self._helper.ask(question, call.body)
        except HelperFailed as failure:
            self._note(failure)
            return None
        finally:
            self._waiting_bytes -= len(call.body)
        return self._blocks_of(answer, hashes, block_tokens)

    def _blocks_of(self, answer: dict[str, Any], hashes: bytes, block_tokens: int) -> PromptBlocks | None:
        if reason := answer.get("error"):
            log.debug("a prompt is not tokenised: %s", reason)
            return None
        return PromptBlocks(tuple(array("Q", hashes)), block_tokens, answer["tokens"])

    def _note(self, failure: HelperFailed) -> None:
        if not self._fault:
            self._fault = str(failure)
            log.warning("no tokens of %s: %s; routing by prediction", self._directory, failure)
