"""The KV blocks of an engine with a process of its own, by the ZMQ messages that it publishes.

The engine binds two sockets in the worker's private scratch directory: one publishes a message for each step
that changed something, the other sends old ones again. So a worker that connects late, or misses a message,
asks for what it has not. Token ids stay here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import zmq

from dynaplan.engines.context import EngineContext
from dynaplan.engines.kv_events.block_translation import BlockTranslation
from dynaplan.engines.kv_events.wire import Cleared
from dynaplan.engines.port import BlocksChanged
from dynaplan.events.engine_batches import END_OF_REPLAY, SEQUENCE_BYTES, read_engine_events, sequence_of
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)

REPLAY_S = 5.0
"""Seconds that an engine may take to begin sending old messages again, and between two of them."""

MOST_QUEUED = 100_000
MOST_WAITING = 10_000
"""Messages that wait for older ones; vLLM and SGLang keep as many for sending them again."""

MOST_IN_VAIN = 3
"""Replays without the next message after which it is lost."""

MOST_NAMED = 100

IPC = "ipc://"
LONGEST_PATH_BYTES = 107
"""sun_path is 108 bytes long, with the closing zero."""

MOST_AT_ONCE = 1000
"""Messages that are read from a socket before the event loop gets its turn."""


def publishing(context: EngineContext) -> dict[str, object]:
    """Return ``kv-events-config`` of an engine that publishes to its worker."""
    events, replay = addresses(context)
    return {"publisher": "zmq", "endpoint": events, "replay_endpoint": replay, "topic": ""}


def addresses(context: EngineContext) -> tuple[str, str]:
    """Return where the engine publishes, and where it sends old messages again.

    Raises ConfigError where no private directory for sockets is, or its path is too long for one.
    """
    if not context.scratch_dir:
        raise ConfigError("this worker has no scratch directory", hint="Set DYNAPLAN_SCRATCH_DIR.")
    directory = Path(context.scratch_dir)
    _check_private(directory)
    paths = [directory / f"{context.worker_name}.kv{suffix}" for suffix in ("", "-again")]
    if max(len(os.fsencode(path)) for path in paths) > LONGEST_PATH_BYTES:
        raise ConfigError(
            f"the path of its socket is longer than {LONGEST_PATH_BYTES} bytes: {paths[1]}",
            hint="Choose a shorter directory.",
        )
    return f"{IPC}{paths[0]}", f"{IPC}{paths[1]}"


class BlockEvents:
    """Reads what one engine publishes, in order, and calls ``changed`` with it.

    Raises ConfigError as ``addresses`` does.
    """

    def __init__(self, context: EngineContext, changed: BlocksChanged) -> None:
        self._events, self._replay = addresses(context)
        self._changed = changed
        self._translation = BlockTranslation()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._readers: list[SocketReader] = []
        self._asking: zmq.Socket[bytes] | None = None
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._is_replaying = False
        self._asked_from = 0
        self._in_vain = 0
        self._timer: asyncio.TimerHandle | None = None
        self._named: set[str] = set()
        self._messages = 0
        self._lost = 0
        self._unreadable = 0

    def start(self) -> None:
        """Connect, and ask for what was published before."""
        self._context = zmq.Context()
        listening = self._context.socket(zmq.SUB)
        listening.set_hwm(MOST_QUEUED)
        listening.subscribe(b"")
        listening.connect(self._events)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.set_hwm(MOST_QUEUED)
        self._asking.connect(self._replay)
        self._readers = [
            SocketReader(listening, self._on_message),
            SocketReader(self._asking, self._on_old_message),
        ]
        self._ask()

    def close(self) -> None:
        """Close the sockets and end their context; no event of the engine is read any more."""
        if self._timer:
            self._timer.cancel()
        for reader in self._readers:
            reader.close()
        if self._context:
            self._context.term()
            self._context = None

    def metrics(self) -> dict[str, float]:
        """Return what ``/metrics`` tells of the engine's messages."""
        return {
            "dynaplan:kv_engine_messages_total": self._messages,
            "dynaplan:kv_engine_messages_lost_total": self._lost,
            "dynaplan:kv_engine_messages_unreadable_total": self._unreadable,
            "dynaplan:kv_engine_blocks_skipped_total": self._translation.skipped,
        }

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            sequence = sequence_of(frames)
        except ValueError as error:
            self._refuse(error)
            return
        self._take(sequence, frames[2])

    def _on_old_message(self, frames: list[bytes]) -> None:
        """Take one message of a replay: nothing, the topic (vLLM 0.32), the sequence number, the payload."""
        if not self._is_replaying:
            return
        number = frames[-2] if len(frames) in (3, 4) else b""
        if len(number) != SEQUENCE_BYTES:
            self._refuse(ValueError(f"an old message has {len(frames)} frames: expected 3 or 4"))
        elif number == END_OF_REPLAY:
            self._go_on()
        else:
            self._wait_for_replay()
            self._take_old(int.from_bytes(number, "big"), frames[-1])

    def _take_old(self, sequence: int, payload: bytes) -> None:
        """Apply a message of a replay, and before it all earlier ones that wait: no other comes any more."""
        if sequence >= self._next:
            self._waiting[sequence] = payload
        while self._next <= sequence:
            self._skip_to(min(self._waiting))
            self._apply_waiting()

    def _take(self, sequence: int, payload: bytes) -> None:
        """Apply the message if it is the next one; one that is too early waits for those before it."""
        if sequence < self._next:
            return
        self._waiting[sequence] = payload
        self._apply_waiting()
        if self._waiting and not self._is_replaying:
            self._ask()
        if len(self._waiting) > MOST_WAITING:
            self._give_up()

    def _apply_waiting(self) -> None:
        """Apply the next message and its successors, if it is there: then no older one waits."""
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._apply(ready)

    def _apply(self, payload: bytes) -> None:
        self._messages += 1
        try:
            changes = self._translation.changes(read_engine_events(payload))
        except ValueError as error:
            self._refuse(error)
            return
        if changes:
            self._changed(changes)

    def _ask(self) -> None:
        """Ask for the messages from the next one on."""
        assert self._asking is not None
        self._is_replaying = True
        self._asked_from = self._next
        self._wait_for_replay()
        self._asking.send_multipart([b"", self._next.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        self._readers[1].read_soon()

    def _wait_for_replay(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REPLAY_S, self._give_up)

    def _go_on(self) -> None:
        """End a replay; what is still missing was published while it came, or is lost."""
        self._in_vain = self._in_vain + 1 if self._next == self._asked_from else 0
        if self._waiting and self._in_vain < MOST_IN_VAIN:
            self._ask()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Go on with what is there: messages that are missing are lost."""
        self._is_replaying = False
        self._in_vain = 0
        if self._timer:
            self._timer.cancel()
        if self._waiting:
            first = min(self._waiting)
            self._skip_to(first)
            self._take(first, self._waiting.pop(first))

    def _skip_to(self, sequence: int) -> None:
        """Give up the messages before: which blocks are cached is not known, so none is said to be."""
        if sequence == self._next:
            return
        self._lost += sequence - self._next
        log.warning("%d messages about KV blocks are lost: cached prefixes are forgotten", self._lost)
        self._next = sequence
        self._translation.forget()
        self._changed([Cleared()])

    def _refuse(self, error: ValueError) -> None:
        self._unreadable += 1
        if str(error) not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(str(error))
            log.warning("a message about KV blocks cannot be read: %s", error)


class SocketReader:
    """Calls ``receive(frames)`` with each message of a ZMQ socket, in the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self.read_soon()

    def read_soon(self) -> None:
        """Read what is there: to be called after each other use of the socket, which may take its signal."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the socket at once; what it has not sent is thrown away."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)
        self.read_soon()


def _check_private(directory: Path) -> None:
    """Raise ConfigError unless the directory is ours alone; OSError when it is not there."""
    found = directory.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not private: other users could read and forge events there",
            hint=f"chmod 700 {directory}, or choose another directory.",
        )
