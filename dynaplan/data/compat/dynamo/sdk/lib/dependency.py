"""The edges of a graph, where those of 0.2.0 find them."""

from .. import depends

__all__ = ["depends"]
