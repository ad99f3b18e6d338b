"""Why no worker of a service answers: the fleet plugin publishes it, and frontends tell their clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dynaplan.util.documents import object_field, parse_object, text_field, whole_field

ABSENT = "absent"
"""The field of the fleet's document: component -> absence."""

NEVER_ASK_AGAIN_S = 60
"""Seconds after which a client may ask again where only a person can help."""


@dataclass(frozen=True)
class Absence:
    """The absence of every worker of one service.

    ``why`` says it in words. ``retry_unix_s`` is the time at which the next start begins, by the wall clock
    in seconds since 1970: 0 when one has begun, None when none will without a person.
    """

    why: str
    retry_unix_s: int | None = 0

    def retry_s(self, unix_time_s: float) -> float:
        """Return the seconds until a worker is started; infinite when none is without a person."""
        return math.inf if self.retry_unix_s is None else max(0.0, self.retry_unix_s - unix_time_s)

    def retry_after_s(self, unix_time_s: float) -> int:
        """Return the whole seconds after which a client may ask again, at least 1."""
        delay_s = self.retry_s(unix_time_s)
        return NEVER_ASK_AGAIN_S if math.isinf(delay_s) else math.ceil(delay_s) + 1

    def told(self, unix_time_s: float) -> str:
        """Return why there is no worker, and when there may be one, for a client."""
        if self.retry_unix_s is None:
            return self.why
        delay_s = self.retry_s(unix_time_s)
        when = f"is started again in {math.ceil(delay_s)} s" if delay_s else "is being started again"
        return f"{self.why}; it {when}."

    def to_json(self) -> dict[str, Any]:
        """Return the form in which it is published."""
        return {"why": self.why} | ({} if self.retry_unix_s is None else {"retry_unix_s": self.retry_unix_s})


def absence_in(fleet: str, component: str) -> Absence | None:
    """Read a component's absence in the published fleet; None when there is none, or it cannot be read."""
    try:
        found = object_field(object_field(parse_object(fleet), ABSENT, {}), component)
        retry_unix_s = whole_field(found, "retry_unix_s") if "retry_unix_s" in found else None
        return Absence(text_field(found, "why"), retry_unix_s)
    except ValueError:
        return None
