"""The guard of the page: the right host, a session, its key; for actions also the right origin."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from dynaplan.contract.page_access import (
    PAGE_PATH,
    SESSION_S,
    TOKEN_FIELD,
    cookie_name,
    is_key,
    is_session,
    is_token,
    new_session,
    session_key,
)
from dynaplan.http.browser_policy import HostNames
from dynaplan.http.messages import Request

KEY_HEADER = "X-Dynaplan-Key"
"""The header with the session's key. No other site can send it: a browser asks the server first (CORS)."""

SIGN_IN = "Open the address that `dynaplan ui` prints: this browser is not signed in, or no longer."


class PageRefusal(Exception):
    """A request that the page does not answer: the status, and a sentence for the user."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True)
class OpenedSession:
    """A new session: the value of the header ``Set-Cookie``, and its key."""

    set_cookie: str
    key: str


class PageGuard:
    """Raises PageRefusal for requests that are not from a user's own browser and page.

    ``names`` are those of this machine; ``now_s`` the time in seconds since the epoch.
    """

    def __init__(
        self, secret: str, names: HostNames, *, is_tls: bool = False, now_s: Callable[[], float] = time.time
    ) -> None:
        self._secret = secret
        self._names = names
        self._is_tls = is_tls
        self._now_s = now_s

    def check_host(self, request: Request) -> None:
        """Refuse a request whose ``Host`` is not a name of this machine's.

        A browser takes a site whose name resolves to this machine for a moment ("DNS rebinding") for the
        origin of this page. A numeric address cannot be rebound.
        """
        given = request.headers.get_all("Host")
        if len(given) != 1 or not self._names.has(given[0]):
            raise PageRefusal(421, "This name is not this machine's: use its address, or localhost.")

    def open_session(self, request: Request) -> OpenedSession | None:
        """Return a new session when the address bears the token, None without one; refuse a wrong one."""
        given = request.query.get(TOKEN_FIELD)
        if given is None:
            return None
        if not is_token(self._secret, given):
            raise PageRefusal(401, SIGN_IN)
        cookie = new_session(self._secret, self._now_s(), secrets.token_hex(16))
        secure = "; Secure" if self._is_tls else ""
        return OpenedSession(
            f"{cookie_name(self._secret)}={cookie}; Path={PAGE_PATH}; Max-Age={SESSION_S}; HttpOnly; "
            f"SameSite=Strict{secure}",
            session_key(self._secret, cookie),
        )

    def check_cookie(self, request: Request) -> str:
        """Return the session's cookie; refuse a request without one.

        Not by ``SimpleCookie``, which reads nothing behind a cookie that it cannot read: those of other
        programs on this host come in the same header.
        """
        cookies = (each.strip().partition("=") for each in request.headers.get("Cookie").split(";"))
        own = (value for name, _, value in cookies if name == cookie_name(self._secret))
        session = next((each for each in own if is_session(self._secret, each, self._now_s())), None)
        if session is None:
            raise PageRefusal(401, SIGN_IN)
        return session

    def check_key(self, request: Request) -> None:
        """Refuse a request without session or without its key."""
        cookie = self.check_cookie(request)
        if not is_key(self._secret, cookie, request.headers.get(KEY_HEADER)):
            raise PageRefusal(401, SIGN_IN)

    def check_action(self, request: Request) -> None:
        """Protect from CSRF: raise unless the request for an action comes from the page itself."""
        self.check_key(request)
        origin = urlsplit(request.headers.get("Origin"))
        is_ours = (
            origin.scheme in ("http", "https")
            and origin.netloc.lower() == request.headers.get("Host").lower()
        )
        if not is_ours or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise PageRefusal(403, "This does not come from the page itself.")
        if request.headers.get("Content-Type").partition(";")[0].strip().lower() != "application/json":
            raise PageRefusal(415, "An action is JSON.")
