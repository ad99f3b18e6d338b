"""Headers that go on from one server to the next: the trace of a request, and its id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
"""The headers of a trace, by the W3C's recommendation."""

TRACEABLE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,128})?", re.ASCII)
"""The form of ``traceparent``: version, trace, parent and flags, and what later versions add."""

NO_TRACE: Mapping[str, str] = {}

REQUEST_ID = "X-Request-Id"
"""The header with the id of a request, of requests and of responses."""

ATTEMPT_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,160}", re.ASCII)
"""The form of an id that an engine gets: the client's, and what distinguishes its attempts."""

MAX_TRACE_STATE = 512
"""Characters of ``tracestate`` that are passed on at most."""


def trace_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the trace context among these headers, to be passed on; empty without a usable one.

    https://www.w3.org/TR/trace-context/: without taking part in the trace, both headers go on as they are.
    """
    parent, state = headers.get(TRACE_PARENT), headers.get(TRACE_STATE)
    if not isinstance(parent, str) or not TRACEABLE.fullmatch(parent):
        return {}
    if not isinstance(state, str) or not state.isascii() or not state.isprintable():
        return {TRACE_PARENT: parent}
    return {TRACE_PARENT: parent, **({TRACE_STATE: state} if 0 < len(state) <= MAX_TRACE_STATE else {})}


def passed_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that go to a prefilling engine: the trace, and the request's id if it is usable."""
    name = headers.get(REQUEST_ID)
    is_usable = isinstance(name, str) and ATTEMPT_ID.fullmatch(name)
    return {**trace_headers(headers), **({REQUEST_ID: str(name)} if is_usable else {})}
