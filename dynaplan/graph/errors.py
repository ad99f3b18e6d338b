"""Errors in the code of a graph. Each is also the built-in error that its author expects."""

from __future__ import annotations

from dynaplan.util.errors import GraphError, nearest

__all__ = ["InterfaceError", "LinkError", "UnboundDependency", "nearest"]


class LinkError(GraphError, ValueError):
    """``link()`` was asked for an edge that the services' dependencies do not allow."""


class InterfaceError(GraphError, TypeError):
    """A service does not implement its interface, or a decorator got an argument that it cannot use."""


class UnboundDependency(GraphError, AttributeError):
    """A dependency of an instance was used, but no client was bound to it: it is not linked."""
