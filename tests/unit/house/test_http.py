"""One HTTP server and one client for every process."""

from __future__ import annotations

from tests.unit.house.source import MODULES, short

OTHERS = (
    "import aiohttp",
    "from aiohttp",
    "BaseHTTPRequestHandler",
    "asyncio.start_server",
    "HttpRequestParser(",
)


def test_what_serves_or_asks_by_http_does_so_by_the_http_flat() -> None:
    found = {
        f"{short(module)}: {each}" for module in MODULES for each in OTHERS if each in module.read_text()
    }
    assert found == {"dynaplan/http/server.py: HttpRequestParser("}
