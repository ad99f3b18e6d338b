"""Which GPUs a program of a person gets, that is run beside the deployment.

A GPU costs what has to leave it. The cheapest go first:

1. one that nobody has;
2. one whose workers answer nothing yet: failed, crashed, starting;
3. one with models that are loaded on request and not pinned, the longest unused first;
4. one with workers of a planned role, the highest index first: the one that scaling down would take;
5. one with a pinned model.

Equal ones go by their index, the highest first, as a fleet grows from the lowest. What leaves is drained, and
starts on another GPU where one is free: that is the reservation's doing, in ``reconcile``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynaplan.contract.gpus import Gpu, by_reason
from dynaplan.fleet.rules.reconcile import FIRST_TO_LEAVE
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.util.amounts import GIB
from dynaplan.util.errors import CapacityError, ConfigError

FREE, SILENT, ON_REQUEST, PLANNED, PINNED = range(5)


@dataclass(frozen=True)
class LendableGpu:
    """A GPU of the box: the workers that would leave it, or why it cannot be lent now (``taken``).

    ``in_flight`` and ``last_use_unix_s`` are of its models that are loaded on request, where it has any.
    """

    gpu: Gpu
    workers: tuple[Worker, ...] = ()
    taken: str = ""
    is_on_request: bool = False
    is_pinned: bool = False
    in_flight: int = 0
    last_use_unix_s: float = 0.0

    @property
    def cost(self) -> tuple[float, ...]:
        """The rank by which GPUs are chosen, the least first; only good for comparison."""
        if not self.workers:
            return FREE, 0, 0, -self.gpu.index
        if all(each.state is not WorkerState.READY for each in self.workers):
            return SILENT, max(FIRST_TO_LEAVE.get(each.state, 0) for each in self.workers), 0, -self.gpu.index
        rank = PINNED if self.is_pinned else ON_REQUEST if self.is_on_request else PLANNED
        last_use = self.last_use_unix_s if self.is_on_request else -max(each.index for each in self.workers)
        return rank, self.in_flight, last_use, -self.gpu.index


def choose_lent(gpus: Sequence[LendableGpu], number: int, least_bytes: int = 0) -> tuple[LendableGpu, ...]:
    """Return the GPUs that are lent to a program that asks for ``number``, each of ``least_bytes`` or more.

    Raises CapacityError, with what is in the way of each, where too few can be lent now, and ConfigError
    where the box has too few of that size.
    """
    too_small = {each.gpu.index: _too_small(each.gpu, least_bytes) for each in gpus}
    large_enough = sum(not words for words in too_small.values())
    if number > large_enough:
        of_memory = f" with {_shown_gib(least_bytes):g} GiB or more" if least_bytes else ""
        raise ConfigError(
            f"--gpus is {number}, and this box has {large_enough}{of_memory}",
            hint="`dynaplan gpus` shows them.",
        )
    taken: Mapping[int, str] = {each.gpu.index: each.taken or too_small[each.gpu.index] for each in gpus}
    lendable = sorted((each for each in gpus if not taken[each.gpu.index]), key=lambda each: each.cost)
    if len(lendable) < number:
        why = {index: reason for index, reason in taken.items() if reason}
        lines = by_reason(why, [each.gpu for each in gpus])
        counts = f"{number} of {len(gpus)} GPUs asked for, and {len(lendable)} can be lent now"
        raise CapacityError(
            "\n  ".join([counts, *lines]),
            hint="--wait 30m waits for one; `dynaplan gpus` shows who has which.",
        )
    return tuple(sorted(lendable[:number], key=lambda each: each.gpu.index))


def _too_small(gpu: Gpu, least_bytes: int) -> str:
    if (has_gib := _shown_gib(gpu.memory_bytes)) >= _shown_gib(least_bytes):
        return ""
    return f"its {has_gib:g} GiB are less than is asked for"


def _shown_gib(size_bytes: int) -> float:
    """Return an amount as ``dynaplan models`` shows it: who asks for what is shown there gets it."""
    return round(size_bytes / GIB, 1)
