"""The table of limits in docs/security.md says what the code does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.body_reader_main import DOCUMENT_BYTES
from dynaplan.gateway.openai_api import MAX_TEXTS
from dynaplan.gateway.request_bodies import MAX_INLINE_PARSE_BYTES, MAX_UNCOUNTED_BYTES
from dynaplan.gateway.timing import BODY_READER_TIMEOUT_S
from dynaplan.http.acceptor import BACKLOG
from dynaplan.http.limits import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_LINE_BYTES,
    ConnectionLimits,
)
from dynaplan.http.messages import MAX_BODY_BYTES
from dynaplan.worker.server import WORKER_LIMITS
from tests.unit.house.source import REPOSITORY

PAGE = Path(REPOSITORY) / "docs" / "security.md"

FIXED = {
    "body that is parsed in the event loop; larger ones in a process": MAX_INLINE_PARSE_BYTES,
    "time to read a large body": BODY_READER_TIMEOUT_S,
    "fields of a large body without prompt": DOCUMENT_BYTES,
    "texts in a list of prompts, inputs or documents": MAX_TEXTS,
    "request line, one header": MAX_LINE_BYTES,
    "line and headers together": MAX_HEAD_BYTES,
    "headers": MAX_HEADERS,
    "connections that wait to be accepted": BACKLOG,
}


def rows(*, elsewhere: bool = False) -> dict[str, tuple[str, str]]:
    """Limit -> (option, default), of the Frontend or of the other servers."""
    _, _, table = PAGE.read_text().partition("**Limits.**")
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines[2:]]
    return {
        limit: (option.strip("`"), default)
        for limit, option, default, _ in cells
        if (option == "elsewhere") == elsewhere
    }


def shown(name: str, value: float) -> str:
    """The value as the table writes it."""
    if "time" in name or name.endswith(("-timeout", "-wait")):
        return f"{value:g} s"
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if value >= size and value % size == 0 and ("bytes" in name or "bod" in name or "together" in name):
            return f"{value // size:g} {unit}"
    return f"{value:g} bytes" if name == "request line, one header" else f"{value:g}"


def test_the_options_stand_there_with_their_defaults() -> None:
    options = options_of(FrontendSettings)
    written = {option: default for option, default in rows().values() if option != "fixed"}
    for option, default in written.items():
        wanted = shown(option, options[option].default)
        assert default == wanted or default.startswith(f"{wanted}: "), option


def test_no_option_that_is_a_limit_is_missing() -> None:
    limits = {
        name for name in options_of(FrontendSettings) if name.startswith("max-") and "prefill" not in name
    }
    limits |= {name for name in options_of(FrontendSettings) if name.endswith(("-timeout", "-wait"))}
    assert limits - {option for option, _ in rows().values()} == set()


def test_the_fixed_limits_stand_there_with_their_values() -> None:
    fixed = {limit: default for limit, (option, default) in rows().items() if option == "fixed"}
    assert fixed == {limit: shown(limit, value) for limit, value in FIXED.items()}
    text = PAGE.read_text()
    assert f"all bodies of more than {MAX_UNCOUNTED_BYTES // 1024} KiB" in text
    assert f"at most {MAX_CONNECTIONS}" in text


def test_the_limits_of_other_servers_stand_there_with_their_values() -> None:
    limits = rows(elsewhere=True)
    assert limits["one body"][1].startswith(f"{shown('bytes', MAX_BODY_BYTES)};")
    public = f"{ConnectionLimits().write_s:g} s; "
    assert limits["time without reading an answer"][1].startswith(public + "none at a worker's own server")
    assert WORKER_LIMITS.write_s == math.inf
    assert replace(WORKER_LIMITS, write_s=ConnectionLimits().write_s) == ConnectionLimits(option="ulimit -n")
