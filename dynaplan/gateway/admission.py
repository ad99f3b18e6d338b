"""The two checks before a request is read: the API key, and the number of requests that wait already."""

from __future__ import annotations

import hmac

from dynaplan.gateway.openai_api import ApiError


class WaitingRoom:
    """Counts the requests that are accepted and have no first token yet; refuses more than ``largest``."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.waiting = 0

    def check(self) -> None:
        """Raise ApiError (429) when the room is full."""
        if self.waiting >= self._largest:
            raise ApiError(
                429,
                f"{self.waiting} requests are waiting already; try again",
                kind="rate_limit_exceeded",
                code="too_many_waiting",
                metric="overload",
                headers={"Retry-After": "1"},
            )

    def enter(self) -> Place:
        """Return a place in the room, to be left when the answer begins or the request ends."""
        self.check()
        return Place(self)


class Place:
    """One request in the waiting room."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room: WaitingRoom | None = room
        room.waiting += 1

    def leave(self) -> None:
        """Free the place. Only the first call counts."""
        if self._room:
            self._room.waiting -= 1
            self._room = None


class ApiKey:
    """The key that clients must send; an empty key lets every client in."""

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode() if key else b""

    def check(self, authorization: str) -> None:
        """Raise ApiError (401), which tells a missing key from a wrong one, unless the header bears the key.

        The comparison takes the same time wherever the first difference lies, so that response times do not
        tell how much of a guessed key is right.
        """
        given = authorization.encode("utf-8", "surrogateescape")
        if self._expected and not hmac.compare_digest(given, self._expected):
            raise _unauthorized(authorization)


def _unauthorized(authorization: str) -> ApiError:
    """Return the 401 for a request without the key; it says nothing of the given key, nor of ours."""
    scheme, _, key = authorization.partition(" ")
    if not authorization:
        fault, code = "No API key was sent: this service asks for one", "missing_api_key"
    elif scheme.lower() != "bearer" or not key.strip():
        fault, code = "The Authorization header holds no API key", "missing_api_key"
    else:
        fault, code = "The API key is not the one that this service was started with", "invalid_api_key"
    return ApiError(
        401,
        f"{fault}. Send 'Authorization: Bearer <key>', with the value of DYNAPLAN_API_KEY there.",
        kind="authentication_error",
        code=code,
        metric="validation",
        headers={"WWW-Authenticate": "Bearer"},
    )
