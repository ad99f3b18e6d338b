"""The two checks before a request is read: the API key, and the number of requests that wait already."""

from __future__ import annotations

import hmac

from dynaplan.serving.openai_api import ApiError


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
        """Raise ApiError (401) unless the ``Authorization`` header bears the key.

        The comparison takes the same time wherever the first difference lies, so that response times do not
        tell how much of a guessed key is right.
        """
        given = authorization.encode("utf-8", "surrogateescape")
        if self._expected and not hmac.compare_digest(given, self._expected):
            raise ApiError(
                401,
                "A valid API key is needed: 'Authorization: Bearer <key>'",
                kind="authentication_error",
                code="invalid_api_key",
                metric="validation",
                headers={"WWW-Authenticate": "Bearer"},
            )
