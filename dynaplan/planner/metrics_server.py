"""The ``/metrics`` and ``/health`` of a planner that runs on its own; one inside a graph has its worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.http.limits import ConnectionLimits
from dynaplan.util.errors import ConfigError
from dynaplan.util.prometheus_text import CONTENT_TYPE, render
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.http_server import LimitedRunner


async def serve_metrics(
    settings: PlannerSettings, read: Callable[[], Mapping[str, float]], is_well: Callable[[], bool]
) -> LimitedRunner:
    """Serve the gauges that ``read`` returns, and the planner's health, until the runner is cleaned up.

    ``/health`` answers 503 when ``is_well`` says no. Raises ConfigError when the address cannot be listened
    on.
    """
    host, port = settings.metric_reporting_prometheus_host, settings.metric_reporting_prometheus_port

    async def answer(_: web.Request) -> web.Response:
        text = render(read(), {"dynamo_namespace": settings.namespace})
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        status, code = ("ready", 200) if is_well() else ("standing still", 503)
        return web.json_response({"status": status}, status=code)

    application = web.Application()
    application.router.add_get("/metrics", answer)
    application.router.add_get("/health", health)
    runner = LimitedRunner(application, ConnectionLimits(option="ulimit -n"), access_log=None)
    await runner.setup()
    try:
        runner.listen(bound_socket(host, port))
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"Planner.metric-reporting-prometheus-port: {port} of {host} cannot be listened on: "
            f"{error.strerror}",
            hint="Expected a free port, or 0 for none, and an address of this machine.",
        ) from error
    return runner
