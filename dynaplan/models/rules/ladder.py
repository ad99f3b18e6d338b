"""The ladder from ready over asleep to unloaded: which step is taken, and what is gained by it.

A sleeping model gives back most of its memory, and is back sooner than an unloaded one. What a level gains by
leaving a model there and not unloading it is the time to load less the time to wake; what it costs is the
memory that is kept, on the device and in the host. So there are two questions:

- Another model needs the room (``for_room``): the level that is quickest to wake of those that make it.
- Nobody needs it, the model has only been idle too long (``for_idleness``): the level with the greatest
  product of time saved and memory given back. Unloading saves no time, so any level comes before it, and a
  model that has been asleep for its ``ttl`` once more is unloaded.

A sleeper's process keeps its GPU at a higher power than an unused one has: by 26 W on an A100, 50 on an H100,
66 on an L40S, whatever memory it holds (arXiv 2605.23918). So a model that nobody has asked for since
``power_saving_after_s`` is unloaded, whether it is ready or asleep.

A sleep is believed when the driver has seen the memory come back. Where it has not after ``SETTLE_S``, the
sleep has failed: the worker is stopped, which does give memory back, and the model is not put to sleep again.
"""

from __future__ import annotations

from math import inf

from dynaplan.models.model import HOST, Device, ModelPolicy, ModelState, ModelStatus, SleepLevel
from dynaplan.models.rules.memory import Holdings, free_bytes, level_of, load_s
from dynaplan.util.amounts import gib

SETTLE_S = 10.0
"""How long memory may take to come back after an engine has said that it sleeps."""

KEPT_TOLERANCE = 1.25
"""By how much a sleeper may exceed what its level keeps before the sleep has failed."""

KEPT_TOLERANCE_BYTES = 256 * 2**20


def for_room(
    settings: ModelPolicy, status: ModelStatus, spare_bytes: int, host: Device | None, holdings: Holdings
) -> SleepLevel | None:
    """Return the level, quickest to wake, at which the model makes enough room; None: unload it.

    ``spare_bytes`` is what would be left over on its fullest device if it were unloaded.
    """
    fitting = [each for each in _levels(settings, status, host, holdings) if each.kept_bytes <= spare_bytes]
    return min(fitting, key=lambda each: each.wake_s, default=None)


def for_idleness(
    settings: ModelPolicy,
    status: ModelStatus,
    held_bytes: int,
    host: Device | None,
    holdings: Holdings,
    now_s: float,
) -> SleepLevel | None:
    """Return the level that saves most time and memory while nobody needs the room; None: unload it."""
    if power_saving_at_s(settings, status) <= now_s:
        return None

    def gain(level: SleepLevel) -> float:
        return (load_s(settings, status) - level.wake_s) * (held_bytes - level.kept_bytes)

    return max(_levels(settings, status, host, holdings), key=gain, default=None)


def _levels(
    settings: ModelPolicy, status: ModelStatus, host: Device | None, holdings: Holdings
) -> list[SleepLevel]:
    """Return the levels at which a ready model may sleep: quicker to wake than a load, with room in the host.

    There are none for a model that has failed to sleep.
    """
    if status.state is not ModelState.READY or status.has_failed_to_sleep:
        return []
    room = free_bytes(host, holdings) if host else 0
    quicker = [each for each in settings.sleep_levels if each.wake_s < load_s(settings, status)]
    return [each for each in quicker if each.host_bytes <= room]


def host_of(devices: tuple[Device, ...]) -> Device | None:
    return next((each for each in devices if each.index == HOST), None)


def failed_sleep(settings: ModelPolicy, status: ModelStatus, now_s: float) -> str:
    """Return why a model's sleep, or its waking, has failed; empty while it has not."""
    if status.sleep_failure:
        return f"its sleep failed: {status.sleep_failure}; it is stopped instead"
    level = level_of(settings, status.sleep_level)
    if status.state is not ModelState.ASLEEP or level is None or now_s < status.since_s + SETTLE_S:
        return ""
    most = max(level.kept_bytes * KEPT_TOLERANCE, level.kept_bytes + KEPT_TOLERANCE_BYTES)
    index, held = max(status.held_bytes.items(), key=lambda each: each[1], default=(HOST, 0))
    if held <= most:
        return ""
    return (
        f"its sleep (level {level.name}) gave too little memory back: {SETTLE_S:.0f} s later it still holds "
        f"{gib(held)} of {device_name(index)}, where {gib(level.kept_bytes)} are usual; it is stopped instead"
    )


def idle_until_s(settings: ModelPolicy, status: ModelStatus) -> float:
    """Return when an idle model has been idle for too long; infinity when that is never.

    A model that answers, loads, or is wanted is not idle. A sleeper is unloaded after as long again.
    """
    is_resting = status.state in (ModelState.READY, ModelState.ASLEEP)
    if settings.is_pinned or not is_resting or status.in_flight or status.waiting:
        return inf
    limit_s = (settings.ttl_s or inf) if status.keep_alive_s is None else status.keep_alive_s
    idle_until_s = max(status.last_use_s, status.since_s) + limit_s
    return max(min(idle_until_s, power_saving_at_s(settings, status)), status.keep_until_s)


def power_saving_at_s(settings: ModelPolicy, status: ModelStatus) -> float:
    """Return when the model is to draw no power any more, unless it is used before; infinity for never."""
    is_asleep = status.state is ModelState.ASLEEP and status.last_use_s
    idle_since_s = status.last_use_s if is_asleep else max(status.last_use_s, status.since_s)
    return idle_since_s + (settings.power_saving_after_s or inf)


def device_name(index: int) -> str:
    """Return how a device is called: ``GPU 0``, ``the host's memory``."""
    return "the host's memory" if index == HOST else f"GPU {index}"
