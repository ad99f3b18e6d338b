"""Waits: the workers that wait for GPUs, and the lines that the user reads about them.

A service that lacks a worker for which no GPU is free is told at once. A worker whose own GPU is not free
yet, most often because its last process has just ended, is logged, and told when that takes long. Numbers of
gigabytes that change are no news.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.fleet.plugin.gpu_memory import NOT_SEEN

log = logging.getLogger(__name__)

TELL_AFTER_S = 10.0
"""Time after which the user is told that a worker's own GPU is not free yet, in seconds."""

CHANGING = re.compile(r"\d+ of \d+ GB")


@dataclass
class _Wait:
    kind: str
    since_s: float
    is_told: bool = False


class Waits:
    """Remembers what waits and what was told."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self.reasons: dict[str, str] = {}

    def news(self, services: Mapping[str, str], workers: Mapping[str, str], now_s: float) -> list[str]:
        """Return the lines for the user; ``services`` and ``workers`` are name -> why it waits."""
        self.reasons = {**services, **workers}
        self._waits = {name: self._wait(name, why, now_s) for name, why in self.reasons.items()}
        lines = []
        for name, why in self.reasons.items():
            wait = self._waits[name]
            is_due = name in services or now_s - wait.since_s >= TELL_AFTER_S
            if not wait.is_told and is_due and NOT_SEEN not in why:
                wait.is_told = True
                which = f"{name}: a worker waits for its GPUs" if name in services else f"{name} waits"
                lines.append(f"{which}: {why}")
        return lines

    def overdue(self, now_s: float) -> frozenset[str]:
        """Return what waits for ``TELL_AFTER_S`` or longer."""
        return frozenset(name for name, wait in self._waits.items() if now_s - wait.since_s >= TELL_AFTER_S)

    def _wait(self, name: str, why: str, now_s: float) -> _Wait:
        kind = CHANGING.sub("", why)
        before = self._waits.get(name)
        if before is not None and before.kind == kind:
            return before
        if NOT_SEEN not in why:
            log.info("%s waits: %s", name, why)
        return _Wait(kind, now_s if before is None else before.since_s)
