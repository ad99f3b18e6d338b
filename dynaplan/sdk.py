"""The vocabulary of a graph's author: ``@service``, ``@endpoint``, ``depends()``, ``.link()``, the hooks.

Importing it takes milliseconds: no network, no engine, no numpy.
"""

from dynaplan.config.service_config import ServiceConfig
from dynaplan.graph.endpoints import (
    DynamoTransport,
    Endpoint,
    abstract_endpoint,
    api,
    async_on_start,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
)
from dynaplan.graph.loading import Graph, load_graph
from dynaplan.graph.service import (
    AbstractService,
    ComponentType,
    Dependency,
    PlannerInterface,
    Service,
    depends,
    dynamo_context,
    service,
)

__all__ = [
    "AbstractService",
    "ComponentType",
    "Dependency",
    "DynamoTransport",
    "Endpoint",
    "Graph",
    "PlannerInterface",
    "Service",
    "ServiceConfig",
    "abstract_endpoint",
    "api",
    "async_on_start",
    "depends",
    "dynamo_context",
    "endpoint",
    "liveness",
    "load_graph",
    "on_shutdown",
    "readiness",
    "service",
]
