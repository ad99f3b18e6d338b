"""The changes of the simulated engine's published blocks, collected over a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dynaplan.engines.kv_events import BlockChange, Removed, Stored
from dynaplan.engines.timing_model.kv_blocks import own_hashes


@dataclass(slots=True)
class _Origin:
    """The block before this one, and its own hash; ``users`` are live prompts, and the cache."""

    parent: int | None
    own: int
    users: int = 0


class BlockChanges:
    """A ``dynaplan.engines.timing_model.kv_blocks.BlockListener`` that turns what it hears into changes.

    ``flush`` calls ``changed`` with those since the last time, in their order. The model knows blocks by
    their chained hashes only, so the rest of a change is kept here for as long as a prompt or the cache has
    the block.
    """

    def __init__(self, changed: Callable[[Sequence[BlockChange]], None], block_tokens: int) -> None:
        self._changed = changed
        self._block_tokens = block_tokens
        self._origins: dict[int, _Origin] = {}
        self._pending: list[tuple[int, _Origin | None]] = []

    def add_prompt(self, prompt: Sequence[int], hashes: Sequence[int]) -> None:
        """Note the blocks of a prompt that is served from now on."""
        size, parent = self._block_tokens, None
        for place, block in enumerate(hashes):
            origin = self._origins.get(block)
            if origin is None:
                (own,) = own_hashes(prompt[place * size : (place + 1) * size], size)
                origin = self._origins[block] = _Origin(parent, own)
            origin.users += 1
            parent = block

    def remove_prompt(self, hashes: Sequence[int]) -> None:
        """Note that a prompt with these blocks is no longer served."""
        for block in hashes:
            self._release(block)

    def stored(self, block: int) -> None:
        """Note that a block is published."""
        origin = self._origins[block]
        origin.users += 1
        self._pending.append((block, origin))

    def removed(self, block: int) -> None:
        """Note that a block is evicted."""
        self._release(block)
        self._pending.append((block, None))

    def flush(self) -> None:
        """Call ``changed`` with the changes since the last time, if there are any."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._changed(list(_changes(pending)))

    def _release(self, block: int) -> None:
        origin = self._origins[block]
        origin.users -= 1
        if not origin.users:
            del self._origins[block]


def _changes(pending: Sequence[tuple[int, _Origin | None]]) -> list[BlockChange]:
    changes: list[BlockChange] = []
    for is_removed, group in groupby(pending, lambda each: each[1] is None):
        if is_removed:
            changes.append(Removed(tuple(block for block, _ in group)))
        else:
            changes += _chains([(block, origin) for block, origin in group if origin])
    return changes


def _chains(stored: Sequence[tuple[int, _Origin]]) -> list[BlockChange]:
    """Return one change for each run of blocks that follow each other."""
    runs: list[list[tuple[int, _Origin]]] = []
    for block, origin in stored:
        if not runs or origin.parent != runs[-1][-1][0]:
            runs.append([])
        runs[-1].append((block, origin))
    return [
        Stored(run[0][1].parent, tuple(block for block, _ in run), tuple(origin.own for _, origin in run))
        for run in runs
    ]
