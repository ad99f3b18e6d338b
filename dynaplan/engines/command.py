"""Any program that speaks OpenAI's API, as an engine: ``command: "program --port ${PORT}"``.

Nothing is known of it but its address: the leased port, or ``url``, where its owner has written a port or
a path. It is ready when ``check`` answers (``none``: when anything does), and hung when that does not answer
for ``hang-timeout``; ``stop-command`` ends it, else SIGTERM. It has no metrics, so its requests are counted
by the frontends, and a drain waits for their counts. It is not asked for a key: it listens on loopback, and
trusts the machine's users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaplan.config.command_words import PORT
from dynaplan.engines.api_rules import EngineApi
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.engines.server.engine_options import Options
from dynaplan.engines.server.kind import LaunchLine, ServerKind
from dynaplan.engines.server.metrics import MetricNames
from dynaplan.engines.server.owners_command import URL, check_command, command_line
from dynaplan.util.errors import ConfigError

DEFAULT_CHECK = "/health"

UNCHECKED = "none"
"""The ``check`` of a program that is ready when it answers at all, with whatever status."""


class CommandKind(ServerKind):
    """One command; ``check`` is the path that answers 200 when it takes requests."""

    name = "command"
    api = EngineApi(is_unknown=True)
    metric_names = MetricNames(running=())
    measures_memory = False
    reports_requests = False
    accepts_any_model = True

    def __init__(self, check: str = DEFAULT_CHECK) -> None:
        self.takes_any_status = check == UNCHECKED
        self.ready_path = self.metrics_path = "/" if self.takes_any_status else check

    def own_url(self, options: Options) -> str:
        return str(options.get(URL) or "").replace("://localhost", "://127.0.0.1", 1).rstrip("/")

    def check(self, options: Options, gpus: float) -> None:
        texts = (*check_command(options).texts, *_variables(options))
        if not options.get(URL) and not any(PORT in text for text in texts):
            raise ConfigError(
                f"command is {options['command']!r}",
                hint=f"Expected a program that listens on the port {PORT}, or `{URL}` with its own address.",
            )
        path = options.get("check", DEFAULT_CHECK)
        if not isinstance(path, str) or not (path.startswith("/") or path == UNCHECKED):
            hint = f"Expected a path, such as {DEFAULT_CHECK}, or {UNCHECKED}."
            raise ConfigError(f"check is {path!r}", hint=hint)
        if (url := options.get(URL)) and not str(url).startswith("http://"):
            raise ConfigError(f"{URL} is {url!r}", hint="Expected http://HOST:PORT, with a path or without.")

    def make(self, options: Options, context: EngineContext) -> Engine:
        return ServerKind.make(CommandKind(str(options.get("check", DEFAULT_CHECK))), options, context)

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        return command_line(options, ports[0])


def _variables(options: Options) -> list[str]:
    """Return the values of the worker's variables, in which the port may stand."""
    arguments = options.get("ServiceArgs")
    given = arguments.get("envs") if isinstance(arguments, Mapping) else None
    return [str(value) for value in given.values()] if isinstance(given, Mapping) else []


KIND = CommandKind()
