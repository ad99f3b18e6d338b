"""The image of the original's containers, where graphs of 0.2.0 find it."""

from .. import DYNAMO_IMAGE

__all__ = ["DYNAMO_IMAGE"]
