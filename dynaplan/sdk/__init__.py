"""The vocabulary of a graph's author: ``@service``, ``@endpoint``, ``depends()``, ``.link()``, the hooks.

Importing it takes milliseconds: no network, no engine, no numpy.
"""

from dynaplan.options.service_config import ServiceConfig
from dynaplan.sdk.context import dynamo_context
from dynaplan.sdk.dependency import AbstractService, Dependency, depends
from dynaplan.sdk.endpoints import (
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
from dynaplan.sdk.graph import Graph, load_graph
from dynaplan.sdk.interfaces import PlannerInterface
from dynaplan.sdk.service import ComponentType, Service, service

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
