"""Guards vLLM's server by its API key. Runs in vLLM's process, which may be another Python than ours.

Therefore nothing but the standard library is imported here.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health", "/metrics"})
"""Paths that need no key, as with every worker."""


class Guard:
    """ASGI middleware that asks for ``VLLM_API_KEY`` on every path; vLLM itself does on some."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on a request with the key, or one that needs none; refuse others, websockets too."""
        if scope["type"] not in ("http", "websocket") or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})

    def _may(self, scope: Message) -> bool:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if (path.rstrip("/") or "/") in OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
