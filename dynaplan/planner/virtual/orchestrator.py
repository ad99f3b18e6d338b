"""Carries a planner's decisions out by a command of the user's: one run for each decision."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynaplan.planner.timing import COMMAND_STOP_S, FIRST_RETRY_S, MAX_RETRY_S
from dynaplan.process.subprocesses import start_process
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.contract.store_keys import DesiredCounts
    from dynaplan.planner.virtual.client import VirtualConnectorClient

log = logging.getLogger(__name__)


class Orchestrator:
    """Waits for decisions of ``client``, runs ``command`` in a shell for each, and acknowledges it.

    The command finds the decision in its ``environment``: ``DECISION_ID``, ``NUM_PREFILL_WORKERS`` and
    ``NUM_DECODE_WORKERS``, of which one that was not decided is absent. A command that fails, with any other
    exit code than 0, is run again after a pause that grows. One runs at a time; what is decided meanwhile
    comes next, and of several decisions only the newest.
    """

    def __init__(
        self,
        client: VirtualConnectorClient,
        command: str,
        environment: Mapping[str, str],
        backoff: Backoff | None = None,
    ) -> None:
        self._client = client
        self._command = command
        self._environment = environment
        self._backoff = backoff or Backoff(FIRST_RETRY_S, MAX_RETRY_S)

    async def run(self) -> None:
        """Carry out decision after decision, for ever; cancelled, it ends the command that runs."""
        while True:
            await self.carry_out_next()

    async def carry_out_next(self) -> DesiredCounts:
        """Carry out the next decision, and try again until the command succeeds.

        Return what was acknowledged.
        """
        while True:
            try:
                await self._client.wait()
                decision = await self._client.get()
                code = await self._execute(decision)
                if code == 0:
                    await self._client.complete(decision)
                    log.info("decision %d is carried out", decision.decision_id)
                    self._backoff.reset()
                    return decision
                log.warning("the command ended with %d: decision %d stays open", code, decision.decision_id)
            except StoreUnavailable as error:
                log.warning("the store does not answer: %s", error)
            await self._backoff.pause()

    async def _execute(self, decision: DesiredCounts) -> int:
        """Run the command and return its exit code; minus a signal's number if that ended it."""
        numbers = {
            "DECISION_ID": decision.decision_id,
            "NUM_PREFILL_WORKERS": decision.num_prefill_workers,
            "NUM_DECODE_WORKERS": decision.num_decode_workers,
        }
        said = {name: str(number) for name, number in numbers.items() if number >= 0}
        log.info("carrying out %s", ", ".join(f"{name}={number}" for name, number in said.items()))
        process = await start_process(
            "/bin/sh", "-c", self._command, env={**self._environment, **said}, start_new_session=True
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _end(process)
            raise


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command with all that it has started: SIGTERM, and SIGKILL for what does not heed it."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMAND_STOP_S):
                await process.wait()
    finally:  # also when a second cancel ends the wait
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
