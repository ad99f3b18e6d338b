"""The services of a graph, where those of 0.2.0 find them."""

from .. import service

__all__ = ["service"]
