"""The names that Dynamo's documents import for a program that carries a planner's decisions out.

::

    client = VirtualConnectorClient(DistributedRuntime(asyncio.get_running_loop(), False), namespace)
"""

from __future__ import annotations

from dynaplan.fleet.joining import join
from dynaplan.runtime import VirtualConnectorClient
from dynaplan.worker.distributed_runtime import Runtime

__all__ = ["DistributedRuntime", "VirtualConnectorClient"]


class DistributedRuntime:
    """This process's part in a deployment, found as ``dynaplan.runtime.connect`` finds it.

    What it is made of is dynaplan's ``Runtime``; Dynamo's arguments, a loop and a store's kind, are ignored.
    """

    def __new__(cls, *_ignored: object, **_named: object) -> Runtime:  # type: ignore[misc]
        """Join; the environment or the statefile says which deployment it is."""
        return join()
