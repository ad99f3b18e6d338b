"""The vocabulary of a graph, where those of 0.2.1 find it."""

from .. import DYNAMO_IMAGE, depends, service

__all__ = ["DYNAMO_IMAGE", "depends", "service"]
