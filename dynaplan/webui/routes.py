"""The routes of the page, below ``/ui``: the shell, its files, events, charts, logs, actions, a prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import dynaplan
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.contract.page_access import PAGE_PATH
from dynaplan.gateway.admission import host_names
from dynaplan.http.browser_policy import HostNames
from dynaplan.http.messages import InvalidBody, Request, Response
from dynaplan.http.server import Handler
from dynaplan.lab.drawing.svg import STYLE
from dynaplan.process.helper import HelperLimits, HelperProcess, helper_environment
from dynaplan.webui.actions import command_arguments, log_part, run_command
from dynaplan.webui.charts import ChartsRequest
from dynaplan.webui.page_guard import PageGuard, PageRefusal
from dynaplan.webui.sse_clients import SseClients
from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)

DIRECTORY = Path(dynaplan.__file__).parent / "data" / "page"
"""The folder with the page's files."""

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The browser's orders: load and run the page's own files alone, make no markup or code of text."""

HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""The headers of every answer below ``/ui``."""

FEED = "dynaplan.cli.page_feed"
"""The module that polls the deployment, in a process of its own."""

FEED_ANSWER_S = 60.0
"""Longest time for its answer, its start on a busy machine included, in seconds."""

MAX_ACTION_BYTES = 4096

BODY_S = 10.0
"""Seconds in which the body of an action must arrive."""

MAX_ACTIONS = 4
"""The largest number of commands that the page runs at once."""


@dataclass(frozen=True)
class PageSettings:
    """The place of a page: its deployment, the logs there, and how its frontend is reached."""

    namespace: str
    secret: str
    log_dir: Path
    names: HostNames
    is_tls: bool = False
    api_key: str = ""


class PageRoutes:
    """Answers every request below ``/ui``. ``chat`` answers a chat request as any client's."""

    def __init__(self, place: PageSettings, chat: Handler) -> None:
        self._place = place
        self._chat = chat
        self._guard = PageGuard(place.secret, place.names, is_tls=place.is_tls)
        self._clients = SseClients(make_feed(place.namespace))
        self._running = 0
        self._handlers: Mapping[tuple[str, str], Handler] = {
            ("GET", ""): self._shell,
            ("GET", "/ui.js"): self._file("ui.js", "text/javascript"),
            ("GET", "/charts.js"): self._file("charts.js", "text/javascript"),
            ("GET", "/ui.css"): self._file("ui.css", "text/css"),
            ("GET", "/events"): self._events,
            ("GET", "/charts.svg"): self._charts,
            ("GET", "/log"): self._log,
            ("POST", "/act"): self._act,
            ("POST", "/prompt"): self._prompt,
        }

    async def handle(self, request: Request) -> Response | None:
        """Return the answer, or None when it has been sent; a refusal says in a sentence what to do."""
        try:
            self._guard.check_host(request)
            response = await self._answer(request)
        except PageRefusal as refusal:
            response = Response.text(refusal.text + "\n", refusal.status)
        return response and replace(response, headers={**response.headers, **HEADERS})

    async def close(self) -> None:
        """End the open pages, and the process that polls for them."""
        await self._clients.close()

    async def _answer(self, request: Request) -> Response | None:
        path = request.path.removeprefix(PAGE_PATH).rstrip("/")
        handler = self._handlers.get((request.method, path))
        if handler is None:
            self._guard.check_cookie(request)
            raise PageRefusal(404, "There is no such page.")
        return await handler(request)

    # -- what a session may see ------------------------------------------------------------------

    async def _shell(self, request: Request) -> Response:
        """Open a session for the token and lead to the address without it, or return the page itself.

        The session's key goes behind a ``#``: a browser sends that part to nobody.
        """
        opened = self._guard.open_session(request)
        if opened is None:
            self._guard.check_cookie(request)
            return _file("ui.html", "text/html")
        leads = {"Set-Cookie": opened.set_cookie}
        target = f"{PAGE_PATH}#{opened.key}"
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # After a redirect that began at another site, the browser would not send the new cookie.
            return Response(200, {**leads, "Refresh": f"0; url={target}", **_PLAIN}, b"Signed in.\n")
        return Response(303, {**leads, "Location": target}, b"")

    def _file(self, name: str, content_type: str) -> Handler:
        async def answer(request: Request) -> Response:
            self._guard.check_cookie(request)
            return _file(name, content_type)

        return answer

    async def _events(self, request: Request) -> None:
        """Stream what is seen, as server-sent events, for as long as the page is open."""
        self._guard.check_key(request)
        asked = _charts_request(request)
        if self._clients.is_full:
            raise PageRefusal(503, "This page is open too often.")
        answer = request.connection
        answer.start_stream(request, {**HEADERS, "Content-Type": "text/event-stream"})
        events = self._clients.watch(asked)
        try:
            await answer.write(b":\n\n")  # a comment: the page knows that it is connected
            async for name, text in events:
                # Drawings are fetched: a browser's parser makes documents of them, no script does.
                event = "charts" if name == asked.name else name
                data = "null" if name == asked.name else text
                await answer.write(f"event: {event}\ndata: {data}\n\n".encode())
            await answer.end_stream()
        finally:
            await events.aclose()

    async def _charts(self, request: Request) -> Response:
        self._guard.check_key(request)
        drawing = self._clients.charts(_charts_request(request))
        if drawing is None:
            raise PageRefusal(404, "These charts are not drawn.")
        return Response.text(drawing, content_type="image/svg+xml; charset=utf-8")

    async def _log(self, request: Request) -> Response:
        self._guard.check_key(request)
        try:
            after = int(request.query.get("after", "-1")[:18])
            text, end = await asyncio.to_thread(
                log_part, self._place.log_dir, request.query.get("worker", ""), after
            )
        except ValueError:
            raise PageRefusal(400, "`after` is a number of bytes.") from None
        except OSError:
            raise PageRefusal(404, "There is no log of that name.") from None
        return Response.json({"text": text, "after": end})

    # -- what a session may do -------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        """Run the command of an action; the answer is what it printed."""
        self._guard.check_action(request)
        arguments = _arguments(await _small_body(request))
        if self._running >= MAX_ACTIONS:
            raise PageRefusal(503, "Other actions are still running.")
        self._running += 1
        try:
            log.info("the page asks for: dynaplan %s", " ".join(arguments))
            output = await run_command([*arguments, "--namespace", self._place.namespace])
        finally:
            self._running -= 1
        return Response.json({"command": " ".join(["dynaplan", *arguments]), "output": output})

    async def _prompt(self, request: Request) -> Response | None:
        """Answer a chat request as the frontend answers any client's, with its key."""
        self._guard.check_action(request)
        authorization = f"Bearer {self._place.api_key}" if self._place.api_key else ""
        headers = request.headers.replaced({"Cookie": "", "Authorization": authorization})
        return await self._chat(request.redirected("/v1/chat/completions", headers))


def make_feed(namespace: str) -> HelperProcess:
    """Return the process that polls that deployment; it has this one's environment, tokens included."""
    environment = {**os.environ, **helper_environment()}
    return HelperProcess(FEED, (namespace,), HelperLimits(FEED_ANSWER_S), environment)


def make_page(runtime: WorkerRuntime, settings: FrontendSettings, chat: Handler) -> PageRoutes | None:
    """Return the page of this process's deployment; None where it is not wanted, and without a ``serve``."""
    log_dir = os.environ.get("DYNAPLAN_LOG_DIR")
    secret = runtime.worker_token if settings.page else ""
    if not (secret and log_dir and os.environ.get("DYNAPLAN_STATEFILE")):
        return None
    is_tls = runtime.server_tls is not None
    place = PageSettings(
        runtime.namespace, secret, Path(log_dir), host_names(settings), is_tls, settings.api_key
    )
    return PageRoutes(place, chat)


_PLAIN = {"Content-Type": "text/plain; charset=utf-8"}


def _file(name: str, content_type: str) -> Response:
    text = (DIRECTORY / name).read_bytes()
    body = STYLE.encode() + text if name.endswith(".css") else text
    return Response(200, {"Content-Type": f"{content_type}; charset=utf-8"}, body)


def _charts_request(request: Request) -> ChartsRequest:
    try:
        return ChartsRequest.of(request.query.get("span", "3600"), request.query.get("width", "1000"))
    except ValueError:
        raise PageRefusal(400, "`span` is in seconds, `width` in px.") from None


async def _small_body(request: Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            while len(body) <= MAX_ACTION_BYTES and (piece := await request.body.read()):
                body += piece
    except TimeoutError:
        raise PageRefusal(408, "The action did not come.") from None
    except InvalidBody:
        raise PageRefusal(400, "The action is broken.") from None
    if len(body) > MAX_ACTION_BYTES:
        raise PageRefusal(413, "An action is short.")
    return body


def _arguments(body: bytes) -> list[str]:
    with suppress(ValueError, RecursionError):
        action = json.loads(body)
        if isinstance(action, dict):
            return command_arguments(action)
    raise PageRefusal(400, "There is no such action.")
