"""``@dynamo_worker``: a program of the original's kind, which gets a runtime as its first argument."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from dynaplan.fleet.joining.connecting import connect
from dynaplan.util.errors import ConfigError
from dynaplan.worker.membership.distributed import DistributedRuntime

Program = Callable[..., Awaitable[Any]]


def dynamo_worker(static: bool = False) -> Callable[[Program], Callable[..., Awaitable[None]]]:
    """Run an async function with a ``DistributedRuntime`` before its arguments, joined as by ``connect()``.

    What it still serves when it returns is drained. ``static``, a worker without discovery, is refused.
    """
    if static:
        raise ConfigError("dynamo_worker(static=True): there are no workers without discovery here")

    def decorate(function: Program) -> Callable[..., Awaitable[None]]:
        @wraps(function)
        async def program(*arguments: Any, **named: Any) -> None:
            async with connect() as runtime:
                await function(DistributedRuntime(runtime), *arguments, **named)

        return program

    return decorate
