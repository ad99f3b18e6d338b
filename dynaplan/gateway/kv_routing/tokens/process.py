"""The tokenising process of one model, as the frontend sees it; ``process_main`` is its other side.

Questions are answered in their order, many at once may be under way, and no request waits long for its own:
without tokens a router predicts. A process that does not come on with a question is killed, and one that has
ended is started again, later each time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path

from dynaplan.gateway.kv_routing.tokens.process_main import ANSWER, FAULT, QUESTION
from dynaplan.gateway.openai_api import Call, PromptBlocks
from dynaplan.process.helper_process import end_helper, helper_environment, kill_helper
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

MAIN = "dynaplan.gateway.kv_routing.tokens.process_main"
"""The module that the process runs."""

WAIT_S = 1.0
"""Time that a request waits for its tokens; a prompt of a million tokens takes about a second."""

HANGS_S = 10.0
"""Time without an answer, the start included, after which the process is killed."""

START_AGAIN_S = (1.0, 5.0, 30.0, 300.0)
"""Time from a process's end to the next start; the last one repeats."""

MOST_WAITING_BYTES = 64 * 1024 * 1024
"""Bodies that wait for the process at most, in bytes; what would exceed them has no tokens."""


class TokenizingProcess:
    """Tokenises the prompts of the model in that directory; ``template`` stands for its own chat template."""

    def __init__(self, directory: Path, template: str = "") -> None:
        self._command = (sys.executable, "-P", "-m", MAIN, str(os.getpid()), str(directory), template)
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._process: Process | None = None
        self._waiting: deque[tuple[asyncio.Future[PromptBlocks | None], int, int]] = deque()
        self._waiting_bytes = 0
        self._came_on_s = 0.0
        self._ends = 0
        self._start_at_s = 0.0
        self._is_starting = False
        self._is_closed = False
        self.fault = "it is being read"
        """The reason why there are no tokens; empty while they come."""

    def start(self) -> None:
        """Start the process, unless it runs, or has ended a moment ago."""
        is_due = self._loop.time() >= self._start_at_s
        if self._process is None and is_due and not self._is_starting and not self._is_closed:
            self._is_starting = True
            self._tasks.spawn(self._run(), "tokenizer")

    async def blocks(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        """Return the prompt's blocks; None when its tokens cannot be known, or not in time."""
        self.start()
        size = len(call.body)
        if self._process is None or self._waiting_bytes + size > MOST_WAITING_BYTES:
            return None
        answer = self._ask(call.body, block_tokens, is_chat=call.endpoint.is_chat)
        done, _ = await asyncio.wait((answer,), timeout=WAIT_S)
        return answer.result() if done else None

    async def close(self) -> None:
        """End the process; return when it is gone."""
        self._is_closed = True
        await self._tasks.cancel()

    def _ask(self, body: bytes, block_tokens: int, *, is_chat: bool) -> asyncio.Future[PromptBlocks | None]:
        assert self._process and self._process.stdin
        if not self._waiting:
            self._came_on_s = self._loop.time()
        answer: asyncio.Future[PromptBlocks | None] = self._loop.create_future()
        self._waiting.append((answer, block_tokens, len(body)))
        self._waiting_bytes += len(body)
        self._process.stdin.write(QUESTION.pack(len(body), block_tokens, is_chat) + body)
        return answer

    async def _run(self) -> None:
        """Start the process and take its answers until it ends."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=helper_environment()
            )
        except OSError as error:
            self.fault = f"its process cannot be started: {error}"
            self._ended()
            return
        self._process = process
        self._is_starting = False
        watch = asyncio.create_task(self._watch(process))
        try:
            self._ask(b"", 1, is_chat=False)
            await self._take_answers(process)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            watch.cancel()
            # Until it is gone it is the process: a second one beside it would take over its questions.
            await end_helper(process)
            self._process = None
            self._ended()

    async def _take_answers(self, process: Process) -> None:
        assert process.stdout
        while True:
            tokens, length = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
            data = await process.stdout.readexactly(length)
            self._came_on_s = self._loop.time()
            answer, block_tokens, size = self._waiting.popleft()
            self._waiting_bytes -= size
            if tokens == FAULT:
                self._refused(data.decode(errors="replace"), is_whole_model=not size)
            elif not size:
                self.fault = ""
                self._ends = 0
            if not answer.done():
                is_good = tokens != FAULT
                hashes = tuple(array("Q", data)) if is_good else ()
                answer.set_result(PromptBlocks(hashes, block_tokens, tokens) if is_good else None)

    def _refused(self, reason: str, *, is_whole_model: bool) -> None:
        if is_whole_model:
            self.fault = reason
            log.warning("no tokens of %s: %s; routing by prediction", self._directory, reason)
        else:
            log.debug("a prompt is not tokenised: %s", reason)

    async def _watch(self, process: Process) -> None:
        """Kill the process when it has not come on with a question for too long."""
        while True:
            await asyncio.sleep(HANGS_S / 4)
            if self._waiting and self._loop.time() - self._came_on_s > HANGS_S:
                self.fault = f"it has not answered for {HANGS_S:g} s"
                log.warning("the tokenizer of %s is killed: %s", self._directory, self.fault)
                kill_helper(process)

    def _ended(self) -> None:
        self._is_starting = False
        self.fault = self.fault or "its process has ended"
        self._start_at_s = self._loop.time() + START_AGAIN_S[min(self._ends, len(START_AGAIN_S) - 1)]
        self._ends += 1
        self._waiting_bytes = 0
        while self._waiting:
            answer, *_ = self._waiting.popleft()
            if not answer.done():
                answer.set_result(None)
