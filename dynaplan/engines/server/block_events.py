"""The KV blocks of an engine with a process of its own, by the ZMQ messages that it publishes.

The engine binds two sockets in the worker's private scratch directory: one publishes a message for each step
that changed something, the other sends old ones again. So a worker that connects late, or misses a message,
asks for what it has not. Token ids stay here.

An engine's own names of its blocks are translated into hashes that are equal in every process
(``BlockTranslator``). Of a block that it stores an engine says which one is before it, and its tokens; of one
that it removes only its own name. So the translator remembers of every block in the cache its chained hash,
and nothing of its tokens. Left out, and so never a hit, are blocks that not only the tokens decide about
(adapters, images, salts), and blocks of another size than those before them, with all that follow them. A
block that an engine has several copies of is removed when the last copy is. Of an engine with several groups
of layers only the first one with full attention is followed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq

from dynaplan.engines.kv_events import BlockChange, Cleared, Removed, Stored
from dynaplan.engines.port import BlockChangesCallback, EngineContext
from dynaplan.engines.timing_model.kv_blocks import chained, own_hashes
from dynaplan.events.engine_batches import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    read_engine_events,
    sequence_of,
)
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)


IPC = "ipc://"
MAX_PATH_BYTES = 107
"""sun_path is 108 bytes long, with the closing zero."""

MAX_AT_ONCE = 1000
"""Messages that are read from a socket before the event loop gets its turn."""


@dataclass(slots=True)
class _CachedBlock:
    """The chained hash of a block, and the number of its copies."""

    chained: int
    copies: int = 1


class BlockTranslator:
    """Translates the events of one engine's blocks.

    ``block_tokens`` is the size of these, 0 before the first.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        self.skipped = 0
        """Blocks that were left out."""

        self._cached: dict[EngineHash, _CachedBlock] = {}
        self._group: int | None = None

    def changes(self, events: Iterable[EngineEvent]) -> list[BlockChange]:
        """Return what the events change, in order; one that changes nothing is left out."""
        translated = (self._translate(event) for event in events)
        return [change for change in translated if change is not None]

    def clear(self) -> None:
        """Forget every block: which ones the engine holds is not known any more."""
        self._cached.clear()

    def _translate(self, event: EngineEvent) -> BlockChange | None:
        match event:
            case BlocksStored():
                return self._stored(event)
            case BlocksRemoved(hashes, group):
                return self._removed(hashes) if group == self._group else None
            case _:
                self.clear()
                return Cleared()

    def _stored(self, event: BlocksStored) -> Stored | None:
        if event.is_full and self._group is None:
            self._group = event.group
        if event.group != self._group:
            return None
        parent = self._cached.get(event.parent) if event.parent is not None else None
        self.block_tokens = self.block_tokens or event.block_tokens
        is_orphan = event.parent is not None and parent is None
        if is_orphan or not event.is_plain or event.block_tokens != self.block_tokens:
            self.skipped += len(event.hashes)
            return None
        own = own_hashes(event.tokens, event.block_tokens)
        before = parent.chained if parent else None
        hashes = chained(own, before)
        first_new = len(hashes)
        for place, (name, block) in enumerate(zip(event.hashes, hashes, strict=True)):
            known = self._cached.get(name)
            if known is None:
                self._cached[name] = _CachedBlock(block)
                first_new = min(first_new, place)
            else:
                known.copies += 1
        if first_new == len(hashes):
            return None
        before = hashes[first_new - 1] if first_new else before
        return Stored(before, tuple(hashes[first_new:]), tuple(own[first_new:]))

    def _removed(self, names: Iterable[EngineHash]) -> Removed | None:
        gone = []
        for name in names:
            known = self._cached.get(name)
            if known is None:
                continue
            known.copies -= 1
            if not known.copies:
                del self._cached[name]
                gone.append(known.chained)
        return Removed(tuple(gone)) if gone else None


REPLAY_TIMEOUT_S = 5.0
"""Seconds that an engine may take to begin sending old messages again, and between two of them."""

ZMQ_QUEUE_LENGTH = 100_000
MAX_OUT_OF_ORDER = 10_000
"""Messages that wait for older ones; vLLM and SGLang keep as many for sending them again."""

MAX_EMPTY_REPLAYS = 3
"""Replays without the next message after which it is lost."""

MAX_LOGGED_ERRORS = 100


def publisher_config(context: EngineContext) -> dict[str, object]:
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
    if max(len(os.fsencode(path)) for path in paths) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the path of its socket is longer than {MAX_PATH_BYTES} bytes: {paths[1]}",
            hint="Choose a shorter directory.",
        )
    return f"{IPC}{paths[0]}", f"{IPC}{paths[1]}"


class BlockEvents:
    """Reads what one engine publishes, in order, and calls ``changed`` with it.

    Raises ConfigError as ``addresses`` does.
    """

    def __init__(self, context: EngineContext, changed: BlockChangesCallback) -> None:
        self._events, self._replay = addresses(context)
        self._changed = changed
        self._translation = BlockTranslator()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._readers: list[SocketReader] = []
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._is_replaying = False
        self._replay_start = 0
        self._empty_replays = 0
        self._timer: asyncio.TimerHandle | None = None
        self._logged: set[str] = set()
        self._messages = 0
        self._lost = 0
        self._unreadable = 0

    def start(self) -> None:
        """Connect, and ask for what was published before."""
        self._context = zmq.Context()
        listening = self._context.socket(zmq.SUB)
        listening.set_hwm(ZMQ_QUEUE_LENGTH)
        listening.subscribe(b"")
        listening.connect(self._events)
        self._replay_socket = self._context.socket(zmq.DEALER)
        self._replay_socket.set_hwm(ZMQ_QUEUE_LENGTH)
        self._replay_socket.connect(self._replay)
        self._readers = [
            SocketReader(listening, self._on_message),
            SocketReader(self._replay_socket, self._on_old_message),
        ]
        self._request_replay()

    def close(self) -> None:
        """Close the sockets and end their context; no event of the engine is read any more."""
        if self._timer:
            self._timer.cancel()
        for reader in self._readers:
            reader.close()
        if self._context:
            self._context.destroy(linger=0)  # term() waits for sockets that a failed start() has left open
            self._context = None

    def metrics(self) -> dict[str, float]:
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
            self._log_unreadable(error)
            return
        self._receive(sequence, frames[2])

    def _on_old_message(self, frames: list[bytes]) -> None:
        """Take one message of a replay.

        Its frames are an empty one, the topic (vLLM 0.32), the sequence number and the payload.
        """
        if not self._is_replaying:
            return
        number = frames[-2] if len(frames) in (3, 4) else b""
        if len(number) != SEQUENCE_BYTES:
            self._log_unreadable(ValueError(f"an old message has {len(frames)} frames: expected 3 or 4"))
        elif number == END_OF_REPLAY:
            self._end_replay()
        else:
            self._restart_replay_timer()
            self._receive_replayed(int.from_bytes(number, "big"), frames[-1])

    def _receive_replayed(self, sequence: int, payload: bytes) -> None:
        """Apply a message of a replay, after those waiting that are older.

        What is missing before it is lost.
        """
        if sequence >= self._next:
            self._waiting[sequence] = payload
        while self._next <= sequence:
            self._skip_to(min(self._waiting))
            self._apply_waiting()

    def _receive(self, sequence: int, payload: bytes) -> None:
        """Apply the message if it is the next one; keep one that is too early until those before it come."""
        if sequence < self._next:
            return
        self._waiting[sequence] = payload
        self._apply_waiting()
        if self._waiting and not self._is_replaying:
            self._request_replay()
        if len(self._waiting) > MAX_OUT_OF_ORDER:
            self._skip_missing()

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
            self._log_unreadable(error)
            return
        if changes:
            self._changed(changes)

    def _request_replay(self) -> None:
        """Ask for the messages from the next one on."""
        assert self._replay_socket is not None
        self._is_replaying = True
        self._replay_start = self._next
        self._restart_replay_timer()
        self._replay_socket.send_multipart([b"", self._next.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        self._readers[1].read_soon()

    def _restart_replay_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REPLAY_TIMEOUT_S, self._skip_missing)

    def _end_replay(self) -> None:
        """End a replay; what is still missing was published while it came, or is lost."""
        self._empty_replays = self._empty_replays + 1 if self._next == self._replay_start else 0
        if self._waiting and self._empty_replays < MAX_EMPTY_REPLAYS:
            self._request_replay()
        else:
            self._skip_missing()

    def _skip_missing(self) -> None:
        """Go on with what is there: messages that are missing are lost."""
        self._is_replaying = False
        self._empty_replays = 0
        if self._timer:
            self._timer.cancel()
        if self._waiting:
            first = min(self._waiting)
            self._skip_to(first)
            self._receive(first, self._waiting.pop(first))

    def _skip_to(self, sequence: int) -> None:
        """Count the messages before as lost, and report that every cached block is forgotten."""
        if sequence == self._next:
            return
        self._lost += sequence - self._next
        log.warning("%d messages about KV blocks are lost: cached prefixes are forgotten", self._lost)
        self._next = sequence
        self._translation.clear()
        self._changed([Cleared()])

    def _log_unreadable(self, error: ValueError) -> None:
        self._unreadable += 1
        if str(error) not in self._logged and len(self._logged) < MAX_LOGGED_ERRORS:
            self._logged.add(str(error))
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
        for _ in range(MAX_AT_ONCE):
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
