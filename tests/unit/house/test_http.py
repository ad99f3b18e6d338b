"""One HTTP server for every process."""

from __future__ import annotations

from tests.unit.house.source import MODULES, short

SERVERS = ("aiohttp.web", "from aiohttp import web", "BaseHTTPRequestHandler", "asyncio.start_server")


def test_no_process_has_an_http_server_but_that_of_the_http_flat() -> None:
    found = {
        f"{short(module)}: {each}" for module in MODULES for each in SERVERS if each in module.read_text()
    }
    assert found == set()
