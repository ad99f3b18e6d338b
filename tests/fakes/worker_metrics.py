"""A source of worker loads that a test sets by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.engines.worker_load import WorkerLoad


class MemoryMetrics:
    """The twin of ``HttpWorkerLoads``; ``by_url`` holds the load of each worker that answers."""

    def __init__(self) -> None:
        self.by_url: dict[str, WorkerLoad] = {}

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """The load that was set for each address, or None."""
        return tuple(self.by_url.get(url) for url in urls)

    async def close(self) -> None:
        """Do nothing: no connection is open."""
