"""A watcher of circus that retries a start which the system refuses.

Out of processes, memory or descriptors for a moment, the system refuses a fork. circus then takes the watcher
for stopped, and one that it was to restart by itself, an embedded server or the fleet plugin, would never
come back.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from circus.watcher import Watcher
from tornado import gen

log = logging.getLogger(__name__)


class RetryingWatcher(Watcher):
    """A watcher that tries again at circus' next check, if it restarts its process (``respawn``)."""

    _is_refused = False

    def spawn_process(self, recovery_wid: int | None = None) -> Any:
        """Start a process; return its start time, True if it is to be tried again, False to be stopped."""
        started = super().spawn_process(recovery_wid)  # type: ignore[no-untyped-call]
        self._is_refused = started is False and self.respawn
        if self._is_refused:
            log.warning("%s could not be started; it is tried again", self.name)
        return started or self._is_refused

    @gen.coroutine
    def _start(self) -> Generator[Any, Any, None]:
        """Start the first process; circus gives a watcher up that has none then."""
        yield super()._start()
        if self._is_refused and self._status == "stopped":
            self._status = "active"
