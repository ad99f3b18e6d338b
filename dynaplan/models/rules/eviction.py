"""Who leaves so that another model can be loaded, and where that one goes.

On a device that lacks room the rule is: as few models as make room, and of all that are as few, the ones that
are worth least to keep. A model's *score* is ::

    idle_s / (reload_s x priority)

the idle time in units of what it costs to have it back (lemonade's rule, with the owner's priority), and
the higher one leaves. ``k``, the least number that makes room, follows from the largest holdings. Then the
candidates are gone through from the highest score down; one is chosen when, with the chosen ones before it,
the largest of the others could still make it k in all. That gives the set of k whose scores, sorted, come
first.

Between devices: the one on which fewer leave, then those worth less, then the one that is filled best. A
worker of several devices takes one after another in that order; what leaves one of them often makes room on
the next. So the number that leave is least for one device, and for several no one leaves in vain.

Constraints of the owner (``Constraints``) come first: whoever must leave for the model by them leaves, and
memory is looked at then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynaplan.models.model import Constraints, Device, ModelPolicy, ModelStatus
from dynaplan.models.rules.memory import (
    Holdings,
    Need,
    free_bytes,
    has_room,
    load_s,
    occupants,
)


@dataclass(frozen=True)
class EvictionChoice:
    """Where a model goes, and who leaves for it, the ones worth least first."""

    devices: tuple[int, ...]
    leaving: tuple[str, ...] = ()


def idle_s(status: ModelStatus, now_s: float) -> float:
    """Return for how long the model has had nothing to do; 0 while it answers or somebody waits for it."""
    if status.in_flight or status.waiting:
        return 0.0
    return max(0.0, now_s - max(status.last_use_s, status.since_s))


def score(settings: ModelPolicy, status: ModelStatus, now_s: float) -> float:
    """Return how little it costs to let the model leave: the highest goes first."""
    return idle_s(status, now_s) / (load_s(settings, status) * settings.priority)


def choose(
    wanted: Need, devices: Sequence[Device], holdings: Holdings, candidates: Sequence[str]
) -> EvictionChoice | None:
    """Return where the model fits when some of the candidates leave; None when it does not with all of them.

    ``candidates`` are in the order in which they should leave. ``holdings`` has nothing of the model itself.
    """
    left = dict(holdings)
    chosen: list[Device] = []
    leaving: list[str] = []
    for _ in range(wanted.places):
        offers = [
            (_preference(offer, candidates, device, left), device, offer)
            for device in devices
            if device not in chosen and (offer := _leaving_on(device, wanted, left, candidates)) is not None
        ]
        if not offers:
            return None
        _, device, offer = min(offers, key=lambda each: each[0])
        chosen.append(device)
        leaving += offer
        left = {name: each for name, each in left.items() if name not in offer}
    return EvictionChoice(
        tuple(sorted(device.index for device in chosen)),
        _drop_needless(wanted, chosen, holdings, sorted(leaving, key=candidates.index)),
    )


_Preference = tuple[int, list[int], int, int]


def _preference(
    offer: Sequence[str], candidates: Sequence[str], device: Device, holdings: Holdings
) -> _Preference:
    """Return a key for the choice of a device, the least the best: few leave, worth little.

    Little is unused.
    """
    ranks = sorted(candidates.index(name) for name in offer)
    return len(offer), ranks, free_bytes(device, holdings), device.index


def _leaving_on(
    device: Device, wanted: Need, holdings: Holdings, candidates: Sequence[str]
) -> list[str] | None:
    """Return the fewest candidates that make room on the device; None when all together do not."""
    if has_room(wanted, device, holdings):
        return []
    there = occupants(device, holdings)
    here = [name for name in candidates if name in there]
    forced = [name for name in here if wanted.is_exclusive or holdings[name].is_exclusive]
    rest = {name: each for name, each in holdings.items() if name not in forced}
    optional = [name for name in here if name not in forced]
    least = _fewest(device, wanted.bytes_on(device.index) - free_bytes(device, rest), optional, rest)
    if least is None:
        return None
    after = {name: each for name, each in rest.items() if name not in least}
    return [*forced, *least] if has_room(wanted, device, after) else None


def _fewest(
    device: Device, lacking_bytes: int, candidates: Sequence[str], holdings: Holdings
) -> list[str] | None:
    """Return the fewest candidates that hold the lacking bytes, earlier ones preferred; None if none do."""
    sizes = {name: holdings[name].bytes[device.index] for name in candidates}
    number = _number_needed(lacking_bytes, sizes)
    if number is None:
        return None
    chosen: list[str] = []
    for position, name in enumerate(candidates):
        others = sorted((sizes[each] for each in candidates[position + 1 :]), reverse=True)
        held = sum(sizes[each] for each in (*chosen, name))
        still = number - len(chosen) - 1
        if still >= 0 and len(others) >= still and held + sum(others[:still]) >= lacking_bytes:
            chosen.append(name)
    return chosen


def _number_needed(lacking_bytes: int, sizes: Mapping[str, int]) -> int | None:
    if lacking_bytes <= 0:
        return 0
    held = 0
    for number, size in enumerate(sorted(sizes.values(), reverse=True), 1):
        held += size
        if held >= lacking_bytes:
            return number
    return None


def _drop_needless(
    wanted: Need, chosen: Sequence[Device], holdings: Holdings, leaving: Sequence[str]
) -> tuple[str, ...]:
    """Take back evictions that turned out unnecessary, the most valuable first."""
    needed = list(leaving)
    for name in reversed(leaving):
        without = [each for each in needed if each != name]
        rest = {each: held for each, held in holdings.items() if each not in without}
        if all(has_room(wanted, device, rest) for device in chosen):
            needed = without
    return tuple(needed)


def must_leave(
    constraints: Constraints, name: str, loaded: Sequence[str], priorities: Mapping[str, float]
) -> frozenset[str]:
    """Return those of the loaded models that the owner does not want beside the model.

    Where there are sets that may be loaded together, one with the model is chosen: that with the least
    outside of it, by priority, between equals the first. A model in no set is alone.
    """
    others = [each for each in loaded if each != name]
    leaves = constraints.leaves.get(name, frozenset()) & set(others)
    if not constraints.together:
        return leaves
    outside = [set(others) - each for each in constraints.together if name in each] or [set(others)]
    return leaves | min(outside, key=lambda each: sum(priorities.get(other, 1.0) for other in each))
