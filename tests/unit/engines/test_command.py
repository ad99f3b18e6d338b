"""Any program as an engine: its command line, and what is refused before it is started."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.engines.command import KIND, CommandKind
from dynaplan.engines.port import EngineContext
from dynaplan.util.errors import ConfigError

OPTIONS = {"command": "sh -c 'serve --port ${PORT} --name \"a b\"'", "model": "m"}


def test_the_leased_port_stands_where_the_command_says_and_no_shell_reads_it() -> None:
    line = CommandKind().command(OPTIONS, EngineContext("ns_m"), [4711])
    assert line.argv == ("sh", "-c", 'serve --port 4711 --name "a b"')


def test_what_ends_it_finds_its_pid_and_its_port() -> None:
    options = {**OPTIONS, "stop-command": "docker stop 'a ${PORT}' ${PID}"}
    assert CommandKind().stop_command(options, 4711, 12) == ["docker", "stop", "a 4711", "12"]
    assert CommandKind().stop_command(OPTIONS, 4711, 12) == []


def test_it_is_ready_and_alive_when_its_check_answers() -> None:
    kind = CommandKind("/v1/models")
    assert (kind.ready_path, kind.metrics_path, kind.reports_requests) == ("/v1/models", "/v1/models", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": None}, "command is None"),
        ({"command": "sh -c serve"}, "command is"),
        ({"command": "no-such-program --port ${PORT}"}, "no program no-such-program"),
        ({"command": "~nobody-here/program --port ${PORT}"}, "no program ~nobody-here/program"),
        ({"stop-command": "no-such-program ${PID}"}, "stop-command is .*no program no-such-program"),
        ({"check": "health"}, "check is 'health'"),
        ({"temperature": 1}, "temperature is no option of a command"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KIND.check({**OPTIONS, **options}, 0)


def test_a_command_that_can_be_started_does_not_raise() -> None:
    KIND.check(OPTIONS, 0)
