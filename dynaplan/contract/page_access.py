"""Access to the web page of a deployment: a token in its address, then a cookie and a key beside it.

All of them derive from the secret that the processes of a deployment share, so every frontend knows them, and
none keeps anything. The token opens a session: a cookie with the time of its end, and the session's key. A
browser sends the cookie by itself, also to other ports of the same host, which another user may listen on;
the key it keeps for this host and port alone, and the page's script sends it. So neither is enough alone.
"""

from __future__ import annotations

import hashlib
import hmac

PAGE_PATH = "/ui"
"""The path of the page on the frontends' public port; all that belongs to it lies below."""

TOKEN_FIELD = "token"
"""The field of the page's address that holds the token."""

SESSION_S = 7 * 86400
"""The time for which a session lasts, in seconds; after it the address with the token opens another."""


def page_token(secret: str) -> str:
    return _derived(secret, "token")


def page_url(base_url: str, secret: str) -> str:
    return f"{base_url}{PAGE_PATH}?{TOKEN_FIELD}={page_token(secret)}"


def cookie_name(secret: str) -> str:
    """Return the cookie's name: cookies do not tell ports apart, and a host may have several deployments."""
    return f"dynaplan-{_derived(secret, 'name')[:8]}"


def new_session(secret: str, now_s: float, nonce: str) -> str:
    """Return the cookie of a new session; ``now_s`` is in seconds since the epoch, ``nonce`` is random."""
    text = f"{int(now_s + SESSION_S)}.{nonce}"
    return f"{text}.{_derived(secret, f'session {text}')}"


def is_session(secret: str, cookie: str, now_s: float) -> bool:
    """Tell whether the cookie is one of ours, and its time is not over."""
    text, _, proof = cookie.rpartition(".")
    if not _is_same(proof, _derived(secret, f"session {text}")):
        return False
    return now_s < int(text.partition(".")[0])


def session_key(secret: str, cookie: str) -> str:
    return _derived(secret, f"key {cookie}")


def is_token(secret: str, given: str) -> bool:
    return _is_same(given, page_token(secret))


def is_key(secret: str, cookie: str, given: str) -> bool:
    return _is_same(given, session_key(secret, cookie))


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), f"dynaplan page {purpose}".encode(), hashlib.sha256).hexdigest()


def _is_same(given: str, expected: str) -> bool:
    """Compare in a time that does not tell where the first difference lies."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
