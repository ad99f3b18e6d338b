"""The most requests that are to run at once on a worker: the planner publishes it, and frontends keep it.

One key for each component, under the planner's lease: where no planner lives there is no limit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dynaplan.util.documents import number_field, parse_object


@dataclass(frozen=True)
class RunningLimit:
    """The limit of each worker of a component.

    ``most`` requests run there at once. One more waits for a place while it will have one within ``wait_s``
    seconds: ``ends_per_s`` are the requests that a worker ends in a second while it is full.
    """

    most: int
    wait_s: float
    ends_per_s: float

    def to_text(self) -> str:
        """Return the text that ``from_text`` reads back."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> RunningLimit:
        """Read the key's value; raises ValueError for another text, or a limit below 1."""
        document = parse_object(text)
        most, wait_s, ends_per_s = (number_field(document, name) for name in ("most", "wait_s", "ends_per_s"))
        if most < 1 or wait_s < 0 or ends_per_s < 0:
            raise ValueError(f"{text} is no limit of running requests")
        return cls(int(most), wait_s, ends_per_s)


def running_limits_prefix(namespace: str) -> str:
    """Return the prefix of the keys; each ends with the name of its component."""
    return f"v1/{namespace}/running_limits/"
