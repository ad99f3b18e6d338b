"""The keys of a deployment in the key-value store, and their values.

1. The desired counts, which are the virtual-connector protocol:
   ``v1/{namespace}/planner/{num_prefill_workers, num_decode_workers, decision_id, scaled_decision_id}``,
   decimal text. The planner writes the first three in one transaction; the executor of the decision writes
   the last as its acknowledgement. -1 means not set. Source: Dynamo's ``VirtualConnectorClient``.
   Dynaplan's ``EXTENSIONS`` of it are below ``v1/{namespace}/planner_extensions/``: Dynamo's client warns of
   every key beside the four. One list or watch of ``v1/{namespace}/planner`` has both.
2. Settings of remote prefill that are changed while requests flow, as in Dynamo 0.2:
   ``/{namespace}/disagg_router/{max_local_prefill_length, max_prefill_queue_size}``, decimal text; a key
   that is deleted gives the configured value back. ``max_local_running`` beside them is dynaplan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dynaplan.graph.lifecycle import Role
from dynaplan.util.documents import whole_number

T = TypeVar("T")

COUNT_KEYS: Mapping[Role, str] = {Role.PREFILL: "num_prefill_workers", Role.DECODE: "num_decode_workers"}
"""The key of each role's desired count."""

SCALED_ROLES = tuple(COUNT_KEYS)
"""The roles whose number of workers is decided at run time: prefill, then decode."""


def planner_prefix(namespace: str) -> str:
    """Return the prefix of the keys of the virtual-connector protocol."""
    return f"v1/{namespace}/planner/"


EXTENSIONS = frozenset(
    {"holds", "reservations", "leave_first", "store_id", "models", "model_workers", "set_apart"}
    | {"option_change"}
)
"""The names of the keys beside the protocol's."""


def scaling_prefix(namespace: str) -> str:
    """Return how the keys of the protocol (``.../planner/``) and of the extensions beside it begin."""
    return f"v1/{namespace}/planner"


def scaling_key(namespace: str, name: str) -> str:
    """Return the key of that name, of the protocol or of an extension."""
    return f"{scaling_prefix(namespace)}{'_extensions' if name in EXTENSIONS else ''}/{name}"


def former_extensions(namespace: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of extensions that are among the protocol's, where 0.1.0 had them: key -> name.

    The fleet plugin moves them when it starts. To be removed with 0.2.
    """
    prefix = planner_prefix(namespace)
    return {
        key: name
        for key in keys
        if key.startswith(prefix) and (name := key.removeprefix(prefix)) in EXTENSIONS
    }


def by_name(namespace: str, keys: Mapping[str, T]) -> dict[str, T]:
    """Return the values by the last part of their key: the planner's and extensions, wherever they are."""
    former = former_extensions(namespace, keys)
    names = {name: keys[key] for key, name in former.items()}
    own = (planner_prefix(namespace), f"{scaling_prefix(namespace)}_extensions/")
    return names | {
        key.rpartition("/")[2]: value
        for key, value in keys.items()
        if key not in former and key.startswith(own)
    }


def fleet_key(namespace: str) -> str:
    """Return the key of the published fleet: JSON with ``{role: {state: count}}`` as its ``roles``."""
    return f"v1/{namespace}/fleet"


GPUS_LEFT_OUT = "gpus_left_out"
"""The field of the published fleet with a line for each reason for which GPUs are not among its total."""

LEAVE_FIRST = "leave_first"
"""The extension that names the worker that leaves first when a decision removes one.

Its text is ``DECISION_ID NAME``: it counts for that decision alone."""


def first_to_leave(namespace: str, keys: Mapping[str, str], decision_id: int) -> str:
    """Return the name of the worker that leaves first by that decision; empty when none is named."""
    written, _, name = by_name(namespace, keys).get(LEAVE_FIRST, "").partition(" ")
    return name if whole_number(written) == decision_id else ""


FREE_GPUS = "free_gpus"
"""The field of the published fleet with the indices of the GPUs that a further worker may get."""


@dataclass(frozen=True)
class DesiredCounts:
    """One scaling decision as it travels; -1 is "not set"."""

    num_prefill_workers: int = -1
    num_decode_workers: int = -1
    decision_id: int = -1
    scaled_decision_id: int = -1

    @classmethod
    def from_keys(cls, namespace: str, keys: Mapping[str, str]) -> DesiredCounts:
        """Read the counts from key -> value; a key that is missing or not a whole number is -1."""
        prefix = planner_prefix(namespace)

        def number(name: str) -> int:
            found = whole_number(keys.get(prefix + name, ""))
            return -1 if found is None else found

        return cls(
            number("num_prefill_workers"),
            number("num_decode_workers"),
            number("decision_id"),
            number("scaled_decision_id"),
        )

    def of(self, role: Role) -> int:
        """Return the number for ``Role.PREFILL`` or ``Role.DECODE``; -1 when it is not set."""
        return self.num_prefill_workers if role is Role.PREFILL else self.num_decode_workers

    @property
    def next_decision_id(self) -> int:
        """One above every id in use, so that no earlier acknowledgement covers it."""
        return max(self.decision_id, self.scaled_decision_id) + 1

    @property
    def is_pending(self) -> bool:
        """True while a written decision has not been acknowledged."""
        return self.decision_id > self.scaled_decision_id


MAX_LOCAL_PREFILL_LENGTH = "max_local_prefill_length"
MAX_LOCAL_RUNNING = "max_local_running"
LIVE_SETTINGS = (MAX_LOCAL_PREFILL_LENGTH, "max_prefill_queue_size", MAX_LOCAL_RUNNING)
"""The names of the settings; each is a number from 0 on."""


def live_settings_prefix(namespace: str) -> str:
    return f"/{namespace}/disagg_router/"


def live_setting(text: str) -> int | None:
    """Read a value; None when it is no whole number from 0 on."""
    found = whole_number(text)
    return None if found is None or found < 0 else found
