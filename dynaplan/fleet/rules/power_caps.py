"""Which power limit a GPU gets for the caps of deployments, and which one it comes back to.

The limit that stood before ours is written down before it is changed, and is set again when no cap holds. The
least of all deployments' caps holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.contract.gpus import PowerLimit


@dataclass(frozen=True)
class CappedLimit:
    """The limit of a GPU that is ours, in watts.

    ``earlier_watts`` stood before, ``asked_watts`` is what we set, and ``set_watts`` what the driver made of
    it: drivers round. It is None until it was read. ``caps`` are those of deployments, by their statefiles.
    """

    earlier_watts: float
    asked_watts: float
    set_watts: float | None
    caps: Mapping[str, float]


def with_cap(
    limit: PowerLimit, known: CappedLimit | None, deployment: str, cap_watts: float | None
) -> tuple[CappedLimit | None, float | None]:
    """Return what to remember when a deployment has this cap, and the watts to set; None for nothing.

    A cap below what the driver takes is as low as it takes. A limit below the caps is nobody's to raise: one
    that somebody has set below ours counts as the earlier one.
    """
    caps = {other: watts for other, watts in (known.caps if known else {}).items() if other != deployment}
    if cap_watts is not None:
        caps[deployment] = cap_watts
    earlier_watts = known.earlier_watts if known else limit.watts
    if known and known.set_watts is not None and limit.watts < known.set_watts:
        earlier_watts = min(earlier_watts, limit.watts)
    target = min(earlier_watts, max(min(caps.values(), default=earlier_watts), limit.least_watts))
    is_set = limit.watts == target
    if known and known.asked_watts == target:
        is_set |= limit.watts == known.set_watts
    if target == earlier_watts:
        return None, None if is_set else target
    remembered = CappedLimit(earlier_watts, target, limit.watts if is_set else None, caps)
    return remembered, None if is_set else target
