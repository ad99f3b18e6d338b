"""Any program that speaks OpenAI's API, as an engine: ``command: "program --port ${PORT}"``.

Nothing is known of it but its address: the leased port, or ``url``, where its owner has written a port or
a path. It is ready when ``check`` answers (``none``: when anything does), and hung when that does not answer
for ``hang-timeout``; ``stop-command`` ends it, else SIGTERM. It has no metrics, so its requests are counted
by the frontends, and a drain waits for their counts. It is not asked for a key: it listens on loopback, and
trusts the machine's users.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.config.stock import OWN_OPTIONS
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.engines.server.engine import ServerEngine
from dynaplan.engines.server.engine_options import Options, split_command
from dynaplan.engines.server.kind import EngineKind, LaunchLine
from dynaplan.engines.server.metrics import MetricNames
from dynaplan.util.errors import ConfigError, nearest

PORT = "${PORT}"
"""What stands for the leased port in a command."""

PID = "${PID}"
"""What stands in a ``stop-command`` for the pid of the program."""

DEFAULT_CHECK = "/health"

STOP_COMMAND = "stop-command"

UNCHECKED = "none"
"""The ``check`` of a program that is ready when it answers at all, with whatever status."""

URL = "url"

KEYS = frozenset({"command", "check", URL, STOP_COMMAND, "model", "served-model-name", *OWN_OPTIONS})
"""The options that a command has: any other would have to go on its command line, by its owner."""


class CommandKind(EngineKind):
    """One command; ``check`` is the path that answers 200 when it takes requests."""

    name = "command"
    metric_names = MetricNames(running=())
    measures_memory = False
    reports_requests = False
    accepts_any_model = True

    def __init__(self, check: str = DEFAULT_CHECK) -> None:
        self.takes_any_status = check == UNCHECKED
        self.ready_path = self.metrics_path = "/" if self.takes_any_status else check

    def own_url(self, options: Options) -> str:
        return str(options.get(URL) or "").replace("://localhost", "://127.0.0.1", 1).rstrip("/")

    def stop_command(self, options: Options, port: int, pid: int) -> Sequence[str]:
        words = split_command(options[STOP_COMMAND], STOP_COMMAND) if options.get(STOP_COMMAND) else ()
        return [word.replace(PORT, str(port)).replace(PID, str(pid)) for word in words]

    def check(self, options: Options, gpus: float) -> None:
        WorkerSettings.from_options(options)
        words = words_of(options)
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"command is {options['command']!r}, but there is no program {words[0]}",
                hint="Expected a program on PATH, or the path of one that may be executed.",
            )
        if (stop := self.stop_command(options, 0, 0)) and shutil.which(stop[0]) is None:
            raise ConfigError(
                f"{STOP_COMMAND} is {options[STOP_COMMAND]!r}, but there is no program {stop[0]}",
                hint="Expected a program on PATH, or leave it out: SIGTERM ends the command then.",
            )
        path = options.get("check", DEFAULT_CHECK)
        if not isinstance(path, str) or not (path.startswith("/") or path == UNCHECKED):
            hint = f"Expected a path, such as {DEFAULT_CHECK}, or {UNCHECKED}."
            raise ConfigError(f"check is {path!r}", hint=hint)
        if (url := options.get(URL)) and not str(url).startswith("http://"):
            raise ConfigError(f"{URL} is {url!r}", hint="Expected http://HOST:PORT, with a path or without.")
        for name in options:
            if name not in KEYS:
                raise ConfigError(
                    f"{name} is no option of a command",
                    hint=f"Write --{name} into the command, if it has that flag. {nearest(name, KEYS)}",
                )

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        return LaunchLine(tuple(word.replace(PORT, str(ports[0])) for word in words_of(options)))


def words_of(options: Options) -> list[str]:
    """Return the words of the command, which must have a place for the port; ConfigError."""
    words = split_command(options.get("command"), "command")
    if not words or not (options.get(URL) or any(PORT in word for word in words)):
        raise ConfigError(
            f"command is {options.get('command')!r}",
            hint=f"Expected a program that listens on the port {PORT}, or `{URL}` with its own address.",
        )
    return [os.path.expanduser(words[0]), *words[1:]]


def check(options: Options, gpus: float) -> None:
    """Raise ConfigError for a command that cannot be started."""
    CommandKind().check(options, gpus)


def make(options: Options, context: EngineContext) -> Engine:
    return ServerEngine(CommandKind(str(options.get("check", DEFAULT_CHECK))), options, context)
