"""How many requests may wait, and who may ask."""

from __future__ import annotations

import hmac

from dynaplan.serving.openai_api import ApiError


class WaitingRoom:
    """The requests that were accepted and have not begun to answer; a full room refuses more."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.waiting = 0

    def check(self) -> None:
        """Raises ApiError (429) when the room is full."""
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
        """A place in the room, to be left when the answer begins, or the request ends."""
        self.check()
        return Place(self)


class Place:
    """One request in the waiting room."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room: WaitingRoom | None = room
        room.waiting += 1

    def leave(self) -> None:
        """The request does not wait any more; only the first call counts."""
        if self._room:
            self._room.waiting -= 1
            self._room = None


class ApiKey:
    """The key that clients must show; an empty one lets everybody in."""

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode() if key else b""

    def check(self, authorization: str) -> None:
        """Raises ApiError (401) unless the ``Authorization`` header bears the key. Takes constant time."""
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
