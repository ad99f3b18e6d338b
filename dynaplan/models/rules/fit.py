"""Which models of a box can be loaded at once.

Each model begins a set, and the others join it while there is room, the ones that need most first, each on
the device that it fills best (``eviction.choose``). What is said to fit together does. That a larger set was
not found proves nothing where a box has several devices: to find the largest one is bin packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.models.model import NO_CONSTRAINTS, Constraints, Device
from dynaplan.models.rules.eviction import choose, must_leave
from dynaplan.models.rules.memory import Holding, Need, promise


@dataclass(frozen=True)
class ModelFit:
    """``together`` are sets of models that fit at once, none a part of another; a model may be in several.

    A set of one is a model that fits beside none of the others. ``never`` are those that do not fit alone.
    Names are in the order of the models.
    """

    together: tuple[tuple[str, ...], ...]
    never: tuple[str, ...]


def fit_models(
    needs: Sequence[Need], devices: Sequence[Device], constraints: Constraints = NO_CONSTRAINTS
) -> ModelFit:
    """Return which of the models fit at once into what the devices have free."""
    able = [each for each in needs if choose(each, devices, {}, ())]
    largest_first = sorted(able, key=lambda each: each.bytes_each * each.places, reverse=True)
    found = {frozenset(_fitting_beside(first, largest_first, devices, constraints)): None for first in able}
    sets = [each for each in found if not any(each < other for other in found)]
    names = [each.model for each in able]
    return ModelFit(
        tuple(tuple(name for name in names if name in each) for each in sets),
        tuple(each.model for each in needs if each not in able),
    )


def _fitting_beside(
    first: Need, others: Sequence[Need], devices: Sequence[Device], constraints: Constraints
) -> list[str]:
    """Return the first model, and those of the others that fit beside it and beside each other."""
    holdings: dict[str, Holding] = {}
    for each in (first, *others):
        loaded = list(holdings)
        is_apart = any(
            must_leave(constraints, name, [*loaded, each.model], {}) for name in (*loaded, each.model)
        )
        if each.model in holdings or is_apart:
            continue
        if choice := choose(each, devices, holdings, ()):
            holdings[each.model] = promise(each, choice.devices)
    return list(holdings)
