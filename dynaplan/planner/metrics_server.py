"""The ``/metrics`` and ``/health`` of a planner that runs on its own; one inside a graph has its worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import Request, Response
from dynaplan.http.server import HttpServer
from dynaplan.util.errors import ConfigError
from dynaplan.util.prometheus_text import CONTENT_TYPE, render
from dynaplan.util.sockets import bound_socket


def serve_metrics(
    settings: PlannerSettings, read: Callable[[], Mapping[str, float]], is_well: Callable[[], bool]
) -> HttpServer:
    """Serve the gauges that ``read`` returns, and the planner's health, until the server is closed.

    ``/health`` answers 503 when ``is_well`` says no. Raises ConfigError when the address cannot be listened
    on.
    """
    host, port = settings.metric_reporting_prometheus_host, settings.metric_reporting_prometheus_port

    async def answer(request: Request) -> Response:
        if request.path == "/metrics":
            text = render(read(), {"dynamo_namespace": settings.namespace})
            return Response.text(text, content_type=CONTENT_TYPE)
        if request.path == "/health":
            status, code = ("ready", 200) if is_well() else ("standing still", 503)
            return Response.json({"status": status}, code)
        return Response.text(f"There is no {request.path} here, only /metrics and /health.", 404)

    server = HttpServer(answer, ConnectionLimits(option="ulimit -n"))
    try:
        server.listen(bound_socket(host, port))
    except OSError as error:
        raise ConfigError(
            f"Planner.metric-reporting-prometheus-port: {port} of {host} cannot be listened on: "
            f"{error.strerror}",
            hint="Expected a free port, or 0 for none, and an address of this machine.",
        ) from error
    return server
