"""An engine's own names of its KV blocks, translated into hashes that are equal in every process.

An engine says of a block that it stores which one is before it, and its tokens; of one that it removes only
its own name. So this remembers of every block in the cache its chained hash, and nothing of its tokens.

Left out, and so never a hit, are blocks that not only the tokens decide about (adapters, images, salts), and
blocks of another size than those before them, with all that follow them. A block that an engine has several
copies of is removed when the last copy is. Of an engine with several groups of layers only the first one with
full attention is followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynaplan.engines.kv_events.wire import Change, Cleared, Removed, Stored
from dynaplan.engines.timing_model.block_hashes import chained, own_hashes
from dynaplan.events.engine_batches import BlocksRemoved, BlocksStored, EngineEvent, EngineHash


@dataclass(slots=True)
class _Known:
    """The chained hash of a block, and the number of its copies."""

    chained: int
    copies: int = 1


class BlockTranslation:
    """The blocks of one engine. ``block_tokens`` is the size of its blocks, 0 before the first."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self.skipped = 0
        """Blocks that were left out."""

        self._known: dict[EngineHash, _Known] = {}
        self._group: int | None = None

    def changes(self, events: Iterable[EngineEvent]) -> list[Change]:
        """Return what the events say, in order; nothing for what says nothing new."""
        translated = (self._translated(event) for event in events)
        return [change for change in translated if change is not None]

    def forget(self) -> None:
        """Forget every block: which ones the engine holds is not known any more."""
        self._known.clear()

    def _translated(self, event: EngineEvent) -> Change | None:
        match event:
            case BlocksStored():
                return self._stored(event)
            case BlocksRemoved(hashes, group):
                return self._removed(hashes) if group == self._group else None
            case _:
                self.forget()
                return Cleared()

    def _stored(self, event: BlocksStored) -> Stored | None:
        if event.is_full and self._group is None:
            self._group = event.group
        if event.group != self._group:
            return None
        parent = self._known.get(event.parent) if event.parent is not None else None
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
            known = self._known.get(name)
            if known is None:
                self._known[name] = _Known(block)
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
            known = self._known.get(name)
            if known is None:
                continue
            known.copies -= 1
            if not known.copies:
                del self._known[name]
                gone.append(known.chained)
        return Removed(tuple(gone)) if gone else None
