"""The decorators of 0.2, where its graphs find them."""

from .. import async_on_start, dynamo_endpoint

__all__ = ["async_on_start", "dynamo_endpoint"]
