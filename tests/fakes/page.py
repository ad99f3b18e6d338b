"""A frontend with its web page, and a browser that is signed in there; no deployment stands behind it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.contract.page_access import page_token
from dynaplan.process.helper import HelperLimits, HelperProcess, helper_environment
from dynaplan.webui import routes
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import TOKEN

FEED = """
import sys
from dynaplan.process.helper_main import become_helper
channel, _ = become_helper(sys.argv[1:])
for question, _ in channel:
    asked = str([list(each) for each in question["charts"]])
    events = [("look", "{}"), ("asked", asked), ("charts-900-1000", "<svg>900</svg>")]
    channel.answer({"events": events})
"""
"""In place of the process that looks at a deployment: a helper that answers at once."""

SILENT = "import sys; sys.exit(3)"
"""In place of it, too: one that ends by itself."""


def feed(directory: Path, script: str = FEED) -> Callable[[str], HelperProcess]:
    """What makes the page's helper: the script."""
    (directory / "page_feed.py").write_text(script)
    path = os.pathsep.join([str(directory), helper_environment()["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path}
    return lambda namespace: HelperProcess("page_feed", (namespace,), HelperLimits(60.0), environment)


@dataclass
class Browser:
    """One browser: its cookies, the key of its session, and the headers that browsers send."""

    here: Stage
    cookies: dict[str, str] = field(default_factory=dict)
    key: str = ""

    async def sign_in(self, token: str = page_token(TOKEN)) -> aiohttp.ClientResponse:
        response = await self.get(f"/ui?token={token}")
        if response.status == 303:
            self.key = response.headers["Location"].partition("#")[2]
            self.cookies = {name: morsel.value for name, morsel in response.cookies.items()}
        return response

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        return await self._request("GET", path, None, headers)

    async def post(self, path: str, body: Any, **headers: str) -> aiohttp.ClientResponse:
        return await self._request("POST", path, body, {"Origin": self.here.url, **headers})

    async def _request(self, method: str, path: str, body: Any, more: dict[str, str]) -> Any:
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers = {"X-Dynaplan-Key": self.key, "Cookie": cookies}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        headers = {name: value for name, value in headers.items() if value}
        url = self.here.url + path
        response = await self.here.client.request(
            method, url, json=body, headers=headers, allow_redirects=False
        )
        if response.content_type != "text/event-stream":
            await response.read()
        return response


@asynccontextmanager
async def page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str = FEED, **options: Any
) -> AsyncIterator[Browser]:
    """A frontend as ``serve`` starts it, with its page."""
    monkeypatch.setenv("DYNAPLAN_STATEFILE", str(tmp_path / "ns.json"))
    monkeypatch.setenv("DYNAPLAN_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(routes, "make_feed", feed(tmp_path, script))
    async with stage(**options) as here:
        yield Browser(here)
