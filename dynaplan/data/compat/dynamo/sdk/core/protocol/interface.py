"""The original's interfaces that a graph names."""

from dynaplan.sdk import AbstractService, ComponentType, DynamoTransport

__all__ = ["AbstractService", "ComponentType", "DynamoTransport"]
