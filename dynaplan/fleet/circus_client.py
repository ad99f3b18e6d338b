"""Commands to the circus arbiter: one at a time, each to its end, repeated while another one runs.

circus carries out one command of the whole arbiter at a time and refuses the others with "arbiter is
already running ..."; without ``waiting`` it answers before the work is done.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from typing import Any

import zmq
import zmq.asyncio

from dynaplan.util.errors import ArbiterBusy, PermanentError

SENDER, OURSELVES, A_PERSON = "sender", "dynaplan", "person"
"""The field of a message, and its values, that show the arbiter whether the plugin or a person sent it."""

REPLACE_EVENT = "replace"
"""The event by which the arbiter informs the fleet plugin that a worker is to be replaced by another."""

EXIT_CODES_COMMAND = "exitcodes"
"""The command, added to circus' own, to which the arbiter answers what ended lately."""

RETRY_FROM_S, RETRY_TO_S = 0.02, 0.05


class CommandRefused(PermanentError):
    """The arbiter will never carry this command out: no such watcher, a name twice, a wrong option."""


CALL_TIMEOUT_S = 10.0
"""Seconds that a command may take, other commands before it included."""


class CircusClient:
    """A client of the arbiter at ``endpoint``; to be used within one event loop, then closed.

    By default the arbiter carries commands out unchanged, as it has to for the fleet plugin. With ``sender``
    A_PERSON it treats them as ``circusctl``'s: it refuses harmful ones, and lets the fleet plugin replace
    a worker that is to be restarted.
    """

    def __init__(self, endpoint: str, sender: str = OURSELVES) -> None:
        self._sender = sender
        self._one_at_a_time = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)

    async def call(self, command: str, **properties: Any) -> dict[str, Any]:
        """Send a circus command with its properties, and return the arbiter's answer.

        Raises ArbiterBusy when the arbiter has not answered within CALL_TIMEOUT_S, or other commands kept it
        busy for so long, and CommandRefused when it refuses the command.
        """
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        async with self._one_at_a_time:
            while True:
                answer = await self._ask(command, properties, deadline_s)
                if answer.get("status") != "error":
                    return answer
                reason = str(answer.get("reason", ""))
                if "arbiter is already running" not in reason and "arbiter is restarting" not in reason:
                    raise CommandRefused(f"circus refused {command} {properties.get('name', '')}: {reason}")
                if time.monotonic() > deadline_s:
                    raise ArbiterBusy(f"circus stays busy: {reason}")
                await asyncio.sleep(random.uniform(RETRY_FROM_S, RETRY_TO_S))

    async def _ask(self, command: str, properties: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        message_id = uuid.uuid4().hex
        message = {
            "id": message_id,
            "command": command,
            "properties": {**properties, "waiting": True},
            SENDER: self._sender,
        }
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._socket.send(json.dumps(message).encode())
                while True:
                    answer: dict[str, Any] = json.loads(await self._socket.recv())
                    # An answer that comes after its deadline must not be taken for the next one's.
                    if answer.get("id") == message_id:
                        return answer
        except TimeoutError:
            raise ArbiterBusy(f"circus did not answer {command} within {CALL_TIMEOUT_S:g} s") from None

    async def add(self, name: str, cmd: str, args: list[str], options: dict[str, Any]) -> int:
        """Add and start the watcher; return the pid of its process, 0 when it could not be started."""
        answer = await self.call("add", name=name, cmd=cmd, args=args, start=True, options=options)
        # circus says ok even when nothing was started: only the list of pids shows it.
        return int(next(iter(answer.get("started", ())), 0))

    async def remove(self, name: str) -> None:
        """Remove the watcher, at once when its process is gone; nothing happens when it is gone itself."""
        try:
            await self.call("rm", name=name)
        except CommandRefused:
            if name in await self.statuses():
                raise

    async def signal(self, name: str, signal_number: int) -> None:
        """Send the signal to the watcher's process. Takes no lock: it works while another command runs."""
        await self.call("signal", name=name, signum=signal_number)

    async def statuses(self) -> dict[str, str]:
        """Every watcher's name, as it was given, with its status: active, starting, stopping or stopped."""
        return dict((await self.call("status"))["statuses"])

    async def pid(self, name: str) -> int:
        """The pid of the watcher's process; 0 when it has none."""
        answer = await self.call("list", name=name)
        return int(next(iter(answer.get("pids", ())), 0))

    async def exit_codes(self) -> dict[int, int]:
        """The exit codes, by pid, of processes that have ended lately; below 0 for a signal."""
        answer = await self.call(EXIT_CODES_COMMAND)
        return {int(pid): code for pid, code in answer["exit_codes"].items()}

    def close(self) -> None:
        self._socket.close()
        self._context.term()
