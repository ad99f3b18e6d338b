"""The memory that request bodies take together, in bytes, and the refusal of what would exceed it."""

from __future__ import annotations

from dynaplan.gateway.openai_api import ApiError

UNCOUNTED_BYTES = 64 * 1024
"""Bodies up to this size are not counted: a client that fills the budget shuts only large ones out.

Their number is bounded by the number of connections.
"""


class BodyBudget:
    """Counts the bytes of the large bodies that are in memory, received in whole or in part."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def body(self) -> BodyShare:
        """Return the share of one body, which is given back at the end of its context."""
        return BodyShare(self)

    def check(self, more_bytes: int) -> None:
        """Raise ApiError (503) when that many bytes more would exceed the budget."""
        if self.held_bytes + more_bytes > self._most_bytes:
            raise ApiError(
                503,
                f"The bodies of other requests take {self.held_bytes} bytes, and all together may take "
                f"{self._most_bytes} (Frontend.max-bodies-bytes). Try again.",
                kind="service_unavailable",
                code="bodies_full",
                metric="overload",
                headers={"Retry-After": "2", "Connection": "close"},
            )


class BodyShare:
    """The part of the budget that one body takes: nothing while it is small."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.counted_bytes = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.held_bytes -= self.counted_bytes

    def check(self, size_bytes: int) -> None:
        """Raise ApiError (503) when a body of that size would exceed the budget now."""
        if size_bytes > UNCOUNTED_BYTES:
            self._budget.check(size_bytes - self.counted_bytes)

    def grow_to(self, size_bytes: int) -> None:
        """Count the body with that size from now on; raises ApiError (503) when the budget is used up."""
        if size_bytes > UNCOUNTED_BYTES:
            self.check(size_bytes)
            self._budget.held_bytes += size_bytes - self.counted_bytes
            self.counted_bytes = size_bytes
