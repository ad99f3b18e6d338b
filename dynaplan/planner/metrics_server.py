"""The ``/metrics`` of a planner that runs on its own; one inside a graph has its worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from dynaplan.domain.errors import ConfigError
from dynaplan.foundation.sockets import bound_socket
from dynaplan.runtime.listening.connections import ConnectionLimits
from dynaplan.runtime.listening.limited_runner import LimitedRunner
from dynaplan.runtime.metrics import CONTENT_TYPE, render


async def serve_metrics(port: int, namespace: str, read: Callable[[], Mapping[str, float]]) -> LimitedRunner:
    """Serve the gauges that ``read`` returns on the loopback address, until the runner is cleaned up.

    Raises ConfigError when the port is taken.
    """

    async def answer(_: web.Request) -> web.Response:
        text = render(read(), {"dynamo_namespace": namespace})
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = LimitedRunner(application, ConnectionLimits(option="ulimit -n"), access_log=None)
    await runner.setup()
    try:
        runner.listen(bound_socket("127.0.0.1", port))
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"Planner.metric-reporting-prometheus-port: {port} cannot be listened on: {error.strerror}",
            hint="Expected a free port, or 0 for none.",
        ) from error
    return runner
