"""How much memory a model needs, and what of each device's memory is taken, now and soon.

What a model needs on each of its devices is, in this order: what its owner claims, what it held when it was
last ready, what is estimated. A load that failed for want of memory has shown that so much is too little: the
model then needs a quarter more than that, whatever was claimed.

What is taken is counted by *holdings*, one for each model, so that a model that loads counts with all that
it will take, and nobody else is placed there before the driver can see it. What a model holds depends on its
state:

=========  ==========================================================================
state      bytes on each of its devices
=========  ==========================================================================
loading    what it needs, or what the driver sees where that is more
ready      what the driver sees, or what the owner claims where that is more
draining   the same; when it has drained nothing, or what its sleep level keeps
asleep     what the driver sees, else what its level keeps; all where its level is not known, as
           of one that was just asked to wake by a fleet plugin that has ended since
=========  ==========================================================================

Where the driver does not tell, the need stands for what it would see. Memory of a worker that has gone and is
not free yet is foreign (``Device.foreign_bytes``), so that nothing is placed on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynaplan.models.model import (
    HOST,
    Device,
    ModelPolicies,
    ModelPolicy,
    ModelState,
    ModelStatus,
    SleepLevel,
)

MORE_THAN_TOO_LITTLE = 1.25
"""How much more than a proven too little a model is taken to need."""

LOAD_BYTES_PER_S = 10**9
"""The speed of a load that nothing is known of: that of an NVMe disk, or a slow page cache."""

MIN_LOAD_S = 1.0
"""The shortest load time that is reckoned with."""


@dataclass(frozen=True)
class Need:
    """What a worker needs: ``bytes_each`` on each of ``devices`` GPUs; with 0 of these, in the host's memory.

    ``allowed`` are the devices that it may have, empty is any; ``chosen_by`` are the owner's words for them.
    An exclusive one is alone on its GPUs. ``parts``, by GPU, are what unequal GPUs have of ``bytes_each``,
    less than 1.
    """

    model: str
    bytes_each: int
    devices: int = 1
    allowed: frozenset[int] = frozenset()
    is_exclusive: bool = False
    chosen_by: str = ""
    parts: Mapping[int, float] = field(default_factory=dict)

    def bytes_on(self, index: int) -> int:
        """Return the bytes that it needs on that device."""
        return int(self.bytes_each * self.parts.get(index, 1.0))

    def may_have(self, device: Device) -> bool:
        is_its_kind = (device.index == HOST) == (self.devices == 0)
        return is_its_kind and not device.unusable and (not self.allowed or device.index in self.allowed)

    @property
    def places(self) -> int:
        """The number of devices that it takes."""
        return max(1, self.devices)


@dataclass(frozen=True)
class Holding:
    """What one model holds, or has been promised: bytes by device."""

    bytes: Mapping[int, int]
    is_exclusive: bool = False


Holdings = Mapping[str, Holding]
"""By the model's name."""


def need(settings: ModelPolicy, status: ModelStatus, devices: Iterable[Device]) -> Need:
    """Return what a worker of the model needs, by its owner's word, a measurement or an estimate.

    More than the most with which a load has failed, but not above the largest device before that was tried.
    """
    base = settings.claim_bytes or status.learnt.memory_bytes or settings.estimate_bytes
    largest = max((device.total_bytes for device in devices), default=0)
    too_little = status.learnt.failed_memory_bytes
    proven = max(int(too_little * MORE_THAN_TOO_LITTLE), too_little + 1) if too_little else 0
    if too_little < largest < proven:
        proven = largest
    return Need(
        status.name,
        max(base, proven),
        settings.devices,
        settings.allowed_devices,
        settings.is_exclusive,
        settings.chosen_by,
        settings.parts,
    )


def load_s(settings: ModelPolicy, status: ModelStatus) -> float:
    """Return how many seconds a load takes: measured, else expected, else by the model's size."""
    known = status.learnt.load_s or settings.estimate_load_s
    size = settings.claim_bytes or status.learnt.memory_bytes or settings.estimate_bytes
    return known or max(MIN_LOAD_S, size * max(1, settings.devices) / LOAD_BYTES_PER_S)


def level_of(settings: ModelPolicy, name: str) -> SleepLevel | None:
    return next((level for level in settings.sleep_levels if level.name == name), None)


def assumed_bytes(policies: ModelPolicies, status: ModelStatus) -> int:
    """Return what the worker is taken to hold of each of its devices until that is measured."""
    settings = policies.models[status.replica_of or status.name]
    settings = settings.prefill if status.is_prefill and settings.prefill else settings
    if status.state is ModelState.ASLEEP and (level := level_of(settings, status.sleep_level)):
        return level.kept_bytes
    return settings.claim_bytes or status.learnt.memory_bytes or settings.estimate_bytes


def holding(settings: ModelPolicy, status: ModelStatus, wanted: Need) -> Holding:
    """Return what a loaded or loading model holds now, by device; see the table above."""
    if status.state is ModelState.ASLEEP and level_of(settings, status.sleep_level):
        usual, least = _kept(settings, status, status.sleep_level), 0
    else:
        usual = {index: wanted.bytes_on(index) for index in status.placed_on}
        least = wanted.bytes_each if status.state is ModelState.LOADING else settings.claim_bytes
    seen = {**usual, **status.held_bytes}
    part = {index: wanted.parts.get(index, 1.0) for index in status.placed_on}
    taken = {index: max(held, int(least * part.get(index, 0.0))) for index, held in seen.items()}
    return Holding(taken, settings.is_exclusive)


def _kept(settings: ModelPolicy, status: ModelStatus, level_name: str) -> dict[int, int]:
    """Return the bytes that a worker asleep at that level keeps, by device; none for an unknown level."""
    level = level_of(settings, level_name)
    if level is None:
        return {}
    kept = dict.fromkeys(status.placed_on, level.kept_bytes)
    if level.host_bytes:
        kept[HOST] = kept.get(HOST, 0) + level.host_bytes
    return kept


def promise(wanted: Need, devices: Iterable[int]) -> Holding:
    """Return what is set aside for a model that is to be loaded on these devices."""
    return Holding({index: wanted.bytes_on(index) for index in devices}, wanted.is_exclusive)


def holding_after_drain(settings: ModelPolicy, status: ModelStatus, sleep_level: str) -> Holding:
    """Return what the model holds once it has drained: what it keeps at that sleep level, for "" nothing."""
    return Holding(_kept(settings, status, sleep_level), settings.is_exclusive)


def free_bytes(device: Device, holdings: Holdings) -> int:
    """Return the bytes of the device that nobody has or is promised.

    Negative when they are promised more than once, or other programs hold what was promised to models.
    """
    taken = sum(each.bytes.get(device.index, 0) for each in holdings.values())
    return device.total_bytes - device.foreign_bytes - taken


def occupants(device: Device, holdings: Holdings) -> list[str]:
    """Return the models that hold any of the device's memory."""
    return [name for name, each in holdings.items() if device.index in each.bytes]


def has_room(wanted: Need, device: Device, holdings: Holdings) -> bool:
    """Tell whether the device can take the worker beside the models that hold memory there."""
    if not wanted.may_have(device) or free_bytes(device, holdings) < wanted.bytes_on(device.index):
        return False
    there = occupants(device, holdings)
    if device.index == HOST:
        return True
    return not there if wanted.is_exclusive else not any(holdings[name].is_exclusive for name in there)


def chosen_place(wanted: Need, devices: Iterable[int]) -> str:
    """Return `` on GPU 0,1 (--tensor-split 1,1)`` where the owner has chosen; else nothing."""
    if not wanted.chosen_by:
        return ""
    gpus = ",".join(str(index) for index in devices if index != HOST)
    return f" {f'on GPU {gpus}' if gpus else 'on the CPU'} ({wanted.chosen_by})"
