"""The paths by which llama-swap's page and programs look at it: logs, events, metrics of requests.

| path | answer |
|---|---|
| ``GET /logs`` | the end of the frontend's and the fleet's log; a browser is led to the page |
| ``GET /logs/stream`` | the same, and what comes; ``?no-history``: only what comes |
| ``GET /logs/stream/proxy``, ``/upstream``, ``/MODEL`` | the same, the logs of all models, the logs of one |
| ``GET /api/events`` | server-sent events: ``modelStatus``, ``logData``, ``metrics``, ``inflight`` |
| ``GET /api/metrics`` | the last requests |

Sources: its ``internal/server`` (``log.go``, ``apigroup.go``) and, of ``metrics``, the older ``proxy``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dynaplan.gateway import model_documents
from dynaplan.gateway.frontend_models import FrontendModel, FrontendModels
from dynaplan.gateway.openai_api import ApiError
from dynaplan.gateway.reports import Reports
from dynaplan.gateway.request_path import RequestPath
from dynaplan.http.messages import Request, Response
from dynaplan.process.log_tail import LogTail

POLL_S = 0.5
"""Time between two looks at what streams tell."""

HISTORY_LINES = 500
"""Lines of each log that come before what is new."""

PROXY, UPSTREAM = "proxy", "upstream"
"""llama-swap's words for its own log, and for those of the models."""

PAGE = "/ui/"

_NOT_BUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _State(NamedTuple):
    """What events tell: the models, the requests in flight, the number of those that have ended."""

    models: list[dict[str, Any]]
    in_flight: int
    requests: int


_NOTHING_TOLD = _State([], -1, -1)


class LlamaSwapApi:
    """Answers llama-swap's own paths. ``log_dir`` is None when the deployment keeps no logs."""

    def __init__(self, path: RequestPath, namespace: str, log_dir: Path | None) -> None:
        self._path = path
        self._namespace = namespace
        self._log_dir = log_dir

    async def logs(self, request: Request) -> Response:
        if "text/html" in request.headers.get("Accept"):
            return Response(302, {"Location": PAGE}, b"")
        logs = self._logs(PROXY)
        try:
            return Response.text(await asyncio.to_thread(logs.history))
        finally:
            logs.close()

    async def stream_logs(self, request: Request, which: str) -> None:
        """Send the log's end, and what comes, until the client leaves; raises ApiError (404)."""
        logs = self._logs(which or PROXY)
        connection = request.connection
        try:
            text = await asyncio.to_thread(logs.history)
            connection.start_stream(request, {"Content-Type": "text/plain; charset=utf-8", **_NOT_BUFFERED})
            text = "" if "no-history" in request.query else text
            while True:
                await connection.write(text.encode())
                await asyncio.sleep(POLL_S)
                text = await asyncio.to_thread(logs.news)
        finally:
            logs.close()

    async def events(self, request: Request) -> None:
        """Stream models, requests and logs: first all there is, then each change, until the client leaves."""
        connection = request.connection
        logs = {name: self._logs(name) for name in (PROXY, UPSTREAM)}
        try:
            texts = {name: await asyncio.to_thread(each.history) for name, each in logs.items()}
            connection.start_stream(request, {"Content-Type": "text/event-stream", **_NOT_BUFFERED})
            told = _NOTHING_TOLD
            while True:
                state = _State(self._statuses(), self._path.in_flight, self._path.reports.requests)
                await connection.write(self._log_events(texts) + self._changes(told, state))
                told = state
                await asyncio.sleep(POLL_S)
                texts = {name: await asyncio.to_thread(each.news) for name, each in logs.items()}
        finally:
            for each in logs.values():
                each.close()

    def _log_events(self, texts: Mapping[str, str]) -> bytes:
        found = ({"source": name, "data": text} for name, text in texts.items() if text)
        return b"".join(_event("logData", each) for each in found)

    def _changes(self, told: _State, state: _State) -> bytes:
        data = b""
        if state.models != told.models:
            data += _event("modelStatus", state.models)
        if state.in_flight != told.in_flight:
            data += _event("inflight", {"total": state.in_flight})
        if state.requests != told.requests:
            data += _event("metrics", requests_since(self._path.reports, max(0, told.requests)))
        return data

    async def metrics(self, request: Request) -> Response:
        return Response.json(requests_since(self._path.reports, 0))

    def _statuses(self) -> list[dict[str, Any]]:
        models = sorted(self._models.all, key=lambda each: each.name)
        return [
            {
                "id": each.name,
                "name": each.display_name,
                "description": each.description,
                "state": model_documents.LLAMA_SWAP_STATE.get(each.state, "stopped"),
                "unlisted": each.is_unlisted,
                "peerID": "",
                "aliases": list(each.aliases),
            }
            for each in models
        ]

    @property
    def _models(self) -> FrontendModels:
        return self._path.models

    def _logs(self, which: str) -> _Logs:
        if which == PROXY:
            return _Logs(self._log_dir, [f"{self._namespace}_Frontend", f"{self._namespace}_fleet"])
        models: Iterable[FrontendModel] = self._models.all
        if which != UPSTREAM:
            if which not in self._models.names():
                problem = f"{which!r} is no log: there are {PROXY}, {UPSTREAM}, and one of each model"
                raise ApiError(404, problem, code="unknown_log", metric="not_found")
            models = [self._models.find(which)]
        return _Logs(self._log_dir, [f"{self._namespace}_{each.component}" for each in models])


class _Logs:
    """The logs of these processes, and of others that are named after them with a number, as one text."""

    def __init__(self, log_dir: Path | None, names: Iterable[str]) -> None:
        self._log_dir = log_dir
        self._names = tuple(names)
        self._tails: dict[Path, LogTail] = {}

    def history(self) -> str:
        """Return the ends of the logs that there are."""
        lines = []
        for each in self._open():
            lines += each.last_lines(HISTORY_LINES)
        return _text(lines)

    def news(self) -> str:
        """Return the lines that were completed since the last call."""
        self._open()
        return _text([line for each in self._tails.values() for line in each.new_lines()])

    def close(self) -> None:
        for each in self._tails.values():
            each.close()

    def _open(self) -> list[LogTail]:
        """Open the log files that have appeared; return their tails."""
        found = []
        for path in sorted(self._log_dir.glob("*.log")) if self._log_dir else ():
            name = path.stem.rstrip("0123456789").removesuffix("_")
            if path not in self._tails and (path.stem in self._names or name in self._names):
                with suppress(FileNotFoundError):
                    self._tails[path] = LogTail(path)
                    found.append(self._tails[path])
        return found


def requests_since(reports: Reports, number: int) -> list[Mapping[str, Any]]:
    """Return the kept requests after the one of that number, the oldest first."""
    kept = reports.recent or ()
    return [each for each in kept if each["id"] >= number]


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _event(kind: str, data: Any) -> bytes:
    document = json.dumps({"type": kind, "data": json.dumps(data)})
    return f"event:message\ndata:{document}\n\n".encode()
