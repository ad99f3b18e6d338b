"""The workers that wait for GPUs, and the lines that the user reads about them.

A service that lacks a worker for which no GPU is free is reported at once. A worker whose own GPU is not free
yet, most often because its last process has just ended, is logged, and reported when that takes long. Each
reason is reported once for as long as the worker waits: one that differs in its gigabytes alone is the same,
and that the memory has not been read yet (``NOT_READ``) is over in a moment, and is not reported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynaplan.contract.gpus import NOT_READ

log = logging.getLogger(__name__)

REPORT_AFTER_S = 10.0
"""Time after which it is reported that a worker's own GPU is not free yet, in seconds."""

AMOUNT_OF_MEMORY = re.compile(r"\d+ of \d+ GiB")


@dataclass
class _Pending:
    """A worker or service that waits: since when, why, and the reasons that were reported.

    Reasons are without the memory in use, which changes all the time.
    """

    since_s: float
    reason: str = ""
    reported: set[str] = field(default_factory=set)


class PendingWorkers:
    """Remembers what waits, why, and what was reported. ``reasons`` are by name of the worker or service."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self.reasons: dict[str, str] = {}

    def update(self, services: Mapping[str, str], workers: Mapping[str, str], now_s: float) -> list[str]:
        """Return the lines to report.

        ``workers``: name of a worker -> why it waits; ``services``: name of a service -> why it gets no
        further worker.
        """
        self.reasons = {**services, **workers}
        self._pending = {name: self._pending.get(name) or _Pending(now_s) for name in self.reasons}
        lines = []
        for name, why in self.reasons.items():
            wait, reason = self._pending[name], AMOUNT_OF_MEMORY.sub("", why)
            if NOT_READ in why:
                continue
            if reason != wait.reason:
                wait.reason = reason
                log.info("%s waits: %s", name, why)
            is_due = name in services or now_s - wait.since_s >= REPORT_AFTER_S
            if is_due and reason not in wait.reported:
                wait.reported.add(reason)
                which = f"{name}: a worker waits for its GPUs" if name in services else f"{name} waits"
                lines.append(f"{which}: {why}")
        return lines

    def overdue(self, now_s: float) -> frozenset[str]:
        """Return the names of the workers and services that have waited for ``REPORT_AFTER_S`` or longer."""
        return frozenset(
            name for name, wait in self._pending.items() if now_s - wait.since_s >= REPORT_AFTER_S
        )
