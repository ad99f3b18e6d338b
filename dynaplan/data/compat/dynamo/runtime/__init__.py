"""The distributed runtime, under the original's names."""

from dynaplan.runtime import dynamo_worker
from dynaplan.worker.membership.distributed import DistributedClient as Client
from dynaplan.worker.membership.distributed import DistributedComponent as Component
from dynaplan.worker.membership.distributed import DistributedRuntime, dynamo_endpoint

__all__ = ["Client", "Component", "DistributedRuntime", "dynamo_endpoint", "dynamo_worker"]
