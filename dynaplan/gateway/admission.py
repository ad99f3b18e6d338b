"""What is checked of a request before it costs a worker anything.

Before its body is read: whether a web page may send it, the API key, and the number of requests that wait
already. Then, once its model is found (``models``): addresses that an engine would fetch, and the length of
the prompt.
"""

from __future__ import annotations

import hmac
import socket
from collections import Counter
from collections.abc import Callable

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.keys import KeySettings
from dynaplan.gateway.keys.keyring import OWNER_GIVES, KeyHolder, Keyring, unauthorized
from dynaplan.gateway.openai_api import ApiError, Call, check_context, check_media
from dynaplan.http.browser_policy import BrowserPolicy, HeaderLookup, HostNames
from dynaplan.util.sockets import listens_on_loopback


class Admission:
    """The checks of one frontend; each raises ApiError for a request that does not pass.

    ``check_key`` takes the headers, and returns whose key is in them where there are several (``keyring``;
    ``api-key`` is that of ``owner`` beside it). ``check_room`` looks whether another request may wait for
    its first token, and ``enter_room`` returns its place among them. ``browsers`` is the rule for web pages.
    """

    def __init__(
        self, settings: FrontendSettings, keyring: Keyring | None = None, owner: KeySettings | None = None
    ) -> None:
        self._settings = settings
        names = host_names(settings) if listens_on_loopback(settings.host) else None
        self.browsers = BrowserPolicy(names, settings.allowed_origins or (), has_key=bool(settings.api_key))
        room = WaitingRoom(settings.max_waiting_requests)
        self.asks_for_key = bool(settings.api_key)
        further = settings.further_api_key or ()
        self._own_key = ApiKey(settings.api_key, *(further if settings.api_key else ()))
        self._keyring = keyring
        self._owner = keyring.holder(owner) if keyring and owner else None
        self.check_key: Callable[[HeaderLookup], KeyHolder | None] = (
            self._find_holder if keyring else self._own_key.check
        )
        self.check_room = room.check
        self.enter_room = room.enter

    def check_admin(self, headers: HeaderLookup, path: str) -> None:
        """Raise ApiError (401, 403) unless a request may move models and see engines."""
        if holder := self.check_key(headers):
            holder.check_admin(path)

    def _find_holder(self, headers: HeaderLookup) -> KeyHolder:
        keyring = self._keyring
        assert keyring
        seen = keyring.seen.get(headers.get("Authorization", ""))
        if seen and seen.expires_unix_s > keyring.unix_s():
            return seen
        given = sent_key(headers, OWNER_GIVES)
        if holder := keyring.find(given):
            return holder
        if self._owner and self._own_key.is_one(given):
            return self._owner
        raise unauthorized("The API key is none of this service", "invalid_api_key", OWNER_GIVES)

    def check_call(self, call: Call, context_tokens: int) -> None:
        """Raise ApiError (400) for addresses that may not be fetched, and a prompt that is too long.

        ``context_tokens`` is 0 where the length of the workers' context is not known.
        """
        if call.address:
            check_media(call.address, self._settings.allow_media_urls)
        if context_tokens:
            check_context(call, context_tokens)


def host_names(settings: FrontendSettings) -> HostNames:
    """Return the names of this machine for clients of a frontend with these settings."""
    return HostNames((settings.host, socket.gethostname()), settings.allowed_hosts or ())


class WaitingRoom:
    """Counts accepted requests without a first token; refuses more than ``max_waiting``."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.waiting = 0
        self.by_key: Counter[str] = Counter()

    def check(self, holder: KeyHolder | None = None) -> None:
        """Raise ApiError (429) when the room is full; a key with less than its share still passes."""
        if self.waiting >= self._max_waiting and not (holder and self._has_share_left(holder.name)):
            raise ApiError(
                429,
                f"{self.waiting} requests are waiting already; try again",
                kind="rate_limit_exceeded",
                code="too_many_waiting",
                metric="overload",
                headers={"Retry-After": "1"},
            )

    def enter(self, holder: KeyHolder | None = None) -> Place:
        """Return a place, to be left when the answer begins or the request ends; raises ApiError (429)."""
        if self.waiting >= self._max_waiting:
            self.check(holder)
        return Place(self, holder.name if holder else "")

    def _has_share_left(self, key: str) -> bool:
        """Tell whether a key has less than an equal part of the room: then even a full room lets it in.

        So a room never holds more than twice as many as may wait.
        """
        others = sum(1 for name, waiting in self.by_key.items() if waiting and name not in (key, ""))
        return self.by_key[key] < self._max_waiting // (others + 1)


class Place:
    """One request in the waiting room."""

    __slots__ = ("_key", "_room")

    def __init__(self, room: WaitingRoom, key: str) -> None:
        self._room: WaitingRoom | None = room
        self._key = key
        room.waiting += 1
        if key:
            room.by_key[key] += 1

    def leave(self) -> None:
        """Free the place. Only the first call counts."""
        if self._room:
            self._room.waiting -= 1
            if self._key:
                self._room.by_key[self._key] -= 1
            self._room = None


class ApiKey:
    """The key that clients must send, or one of several; an empty key lets every client in."""

    def __init__(self, *keys: str) -> None:
        self._expected = [key.encode() for key in keys if key]

    def check(self, headers: HeaderLookup) -> None:
        """Raise ApiError (401) for headers without a key, or with a wrong one."""
        if self._expected and not self.is_one(sent_key(headers, _OWN_KEY)):
            wrong = "The API key is not the one that this service was started with"
            raise unauthorized(wrong, "invalid_api_key", _OWN_KEY)

    def is_one(self, given: bytes) -> bool:
        """Tell whether the given bytes are one of the keys.

        The comparison takes the same time wherever the first difference lies, so that response times do not
        tell how much of a guessed key is right.
        """
        is_same = [hmac.compare_digest(given, each) for each in self._expected]
        return any(is_same)


_OWN_KEY = "the value of DYNAPLAN_API_KEY there"


def sent_key(headers: HeaderLookup, expected: str) -> bytes:
    """Return the key in a request's headers; raises ApiError (401), which says what is ``expected``.

    It stands in ``Authorization``, or in ``x-api-key`` as Anthropic's clients have it.
    """
    authorization = headers.get("Authorization", "")
    if not authorization and (plain := headers.get("x-api-key", "")):
        return plain.strip().encode("utf-8", "surrogateescape")
    scheme, _, key = authorization.partition(" ")
    if not authorization:
        fault = "No API key was sent: this service asks for one"
    elif scheme.lower() != "bearer" or not key.strip():  # RFC 9110: in any case
        fault = "The Authorization header holds no API key"
    else:
        return key.strip().encode("utf-8", "surrogateescape")
    raise unauthorized(fault, "missing_api_key", expected)
