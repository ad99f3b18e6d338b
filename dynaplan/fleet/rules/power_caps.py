"""Which power limits of GPUs are changed for a cap, and which were there before.

The limit that stood before ours is written down before it is changed, and is set again when no cap holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.contract.gpus import PowerLimit

Watts = Mapping[int, float]
"""Watts by GPU."""


def capped(
    limits: Mapping[int, PowerLimit], before: Watts, cap_watts: float | None
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the limits to remember, and those to set now, in watts by GPU.

    ``limits`` are the present ones; ``before`` are those that were set before dynaplan set its own. A cap
    below the driver's least limit means that least. A limit is only ever lowered to the cap, or set back.
    ``cap_watts`` None: no cap is in force, and the limits of before are set back.
    """
    remembered, wanted = dict[int, float](), dict[int, float]()
    for index, limit in limits.items():
        own_watts = before.get(index, limit.watts)
        cap = own_watts if cap_watts is None else max(cap_watts, limit.least_watts)
        if cap < own_watts:
            remembered[index] = own_watts
        wanted[index] = min(cap, own_watts)
    return remembered, {index: watts for index, watts in wanted.items() if watts != limits[index].watts}
