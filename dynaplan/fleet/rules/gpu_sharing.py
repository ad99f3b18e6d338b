"""Sharing GPUs: which deployment of a user gives a GPU to which other, by priority and reserved minimum.

A deployment that lacks a worker has a right to a GPU of another that has more than its ``reserved-gpus``:
when with this worker it has no more than its own ``reserved-gpus``, whatever the priorities, or else when
its ``gpu-priority`` is higher. Nothing is taken between equals. The giver keeps its reserved GPUs, and a
ready worker of each of its components; nobody gives what would not be enough for the one that lacks GPUs.

It does not swing. What was taken by the right of the reserve leaves the taker with no more than its reserve,
so nobody may take it back; what was taken by priority could only be taken back by a higher one. A free GPU is
kept for the one with the better right to it, so that the giver does not start another worker on it.

Each deployment computes the same from what all have published, and acts on its own part only. One worker at a
time is on its way out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.fleet.gpus import Gpu, GpuPool, GpuShare
from dynaplan.fleet.rules.allocation import choose_gpus
from dynaplan.graph.lifecycle import COUNTS, HOLDS_GPUS, Worker, WorkerState
from dynaplan.graph.model import GraphSpec

Shares = Sequence[GpuShare]


@dataclass(frozen=True)
class Transfer:
    """The worker that is to leave next: one of ``component`` of the giver, for the taker."""

    giver: GpuShare
    taker: GpuShare
    pool: GpuPool

    @property
    def why(self) -> str:
        """The reason in words: ``deployment 'two' needs its GPU (gpu-priority 5 over 0)``."""
        return f"deployment {self.taker.namespace!r} needs its GPU ({right(self.taker, self.giver)})"


@dataclass(frozen=True)
class KeptBack:
    """Free GPUs that are for others, with a better right to them; ``why`` names the first, and its right."""

    number: int = 0
    visible: frozenset[str] = frozenset()
    why: str = ""


@dataclass(frozen=True)
class _Wish:
    taker: GpuShare
    short: int
    is_possible: bool


def published(
    base: GpuShare,
    graph: GraphSpec,
    fleet: Sequence[Worker],
    desired: Mapping[str, int],
    inventory: Sequence[Gpu],
    failing: Collection[str],
) -> GpuShare:
    """Return what the deployment says of this fleet; ``base`` has what does not change, and its claims.

    Nothing is wanted for the components that are ``failing``: a worker that does not get ready would take
    GPUs again and again.
    """
    uuid_of = {gpu.index: gpu.uuid for gpu in inventory}
    staying = {uuid_of[index] for each in fleet if each.state in COUNTS & HOLDS_GPUS for index in each.gpus}
    lacking: list[int] = []
    pools = []
    held = {index for each in fleet if each.state in HOLDS_GPUS for index in each.gpus}
    others = uuid_of.keys() - held
    for service in graph.services:
        own = [each for each in fleet if each.component == service.name and each.state in COUNTS]
        if service.gpus >= 1:
            ready = sum(each.state is WorkerState.READY for each in own)
            pools.append(GpuPool(service.name, int(service.gpus), ready))
        missing = 0 if service.in_process_of else desired.get(service.name, 0) - len(own)
        has_room = choose_gpus(inventory, fleet, others, service.gpus) is not None
        if missing > 0 and service.name not in failing and not has_room:
            lacking += [max(1, int(service.gpus))] * missing
    return replace(
        base,
        wants=len(base.held & staying) + min(lacking, default=0),
        wants_in_all=len(base.held & staying) + sum(lacking),
        pools=tuple(pools),
        leaving=base.held - staying,
        promised=0,
    )


def transfer(shares: Shares, claimed: Collection[str]) -> Transfer | None:
    """Return the next worker to leave for another deployment; None while one leaves, or when none is to."""
    if any(share.coming for share in shares):
        return None
    for wish in _wishes(shares, claimed):
        if wish.is_possible and wish.short:
            giver = min(_givers(wish.taker, shares), key=_first_to_give)
            return Transfer(giver, wish.taker, _gifts(giver)[0])
    return None


def after(step: Transfer) -> GpuShare:
    """Return the giver's share once it has chosen the worker."""
    pools = (replace(pool, ready=pool.ready - (pool == step.pool)) for pool in step.giver.pools)
    return replace(step.giver, pools=tuple(pools), promised=step.pool.gpus)


def kept_back(own: GpuShare, shares: Shares, claimed: Collection[str]) -> KeptBack:
    """Return the free GPUs that ``own`` must leave to others."""
    better = [
        wish.taker
        for wish in _wishes(shares, claimed)
        if wish.is_possible and wish.taker.visible & own.visible and _rank(wish.taker) > _rank(own)
    ]
    if not better:
        return KeptBack()
    first = better[0]
    why = f"kept for deployment {first.namespace!r} ({_by_reserve(first) or _by_priority(first, own)})"
    number = sum(each.wants_in_all - len(each.held) for each in better)
    return KeptBack(number, frozenset().union(*(each.visible for each in better)), why)


def outlook(own: GpuShare, shares: Shares, claimed: Collection[str]) -> str:
    """Say from which deployment ``own`` is to get the GPUs that it lacks, or why from none.

    Empty when it lacks none, or when free ones will do.
    """
    wish = next((each for each in _wishes(shares, claimed) if each.taker.pid == own.pid), None)
    others = [share for share in shares if share.pid != own.pid]
    if wish is None or not others:
        return ""
    leaving = [share for share in others if share.coming and share.visible <= own.visible]
    if leaving:
        return "; ".join(
            f"a worker of deployment {each.namespace!r} drains, to give its GPU" for each in leaving
        )
    if wish.is_possible:
        givers = sorted(_givers(own, shares), key=_first_to_give)[:1] if wish.short else []
        return "".join(
            f"deployment {each.namespace!r} is to give one ({right(own, each)})" for each in givers
        )
    return "; ".join(f"deployment {each.namespace!r} gives none: {_refusal(own, each)}" for each in others)


def right(taker: GpuShare, giver: GpuShare) -> str:
    """Return by what right the taker gets a GPU of the giver; empty when it has none."""
    if not giver.visible <= taker.visible:
        return ""
    return _by_reserve(taker) or _by_priority(taker, giver)


def _by_reserve(taker: GpuShare) -> str:
    is_owed = taker.needs and taker.wants <= taker.reserved
    return f"it has {len(taker.held)} of its reserved-gpus {taker.reserved}" if is_owed else ""


def _by_priority(taker: GpuShare, giver: GpuShare) -> str:
    is_higher = taker.priority > giver.priority
    return f"gpu-priority {taker.priority} over {giver.priority}" if is_higher else ""


def _refusal(taker: GpuShare, giver: GpuShare) -> str:
    if not giver.visible <= taker.visible:
        return "it may use GPUs that this one may not"
    if not right(taker, giver):
        return f"its gpu-priority is {giver.priority}, this one's {taker.priority}"
    return f"it keeps reserved-gpus {giver.reserved} and a ready worker of each kind"


def _rank(share: GpuShare) -> tuple[bool, int]:
    return bool(_by_reserve(share)), share.priority


def _wishes(shares: Shares, claimed: Collection[str]) -> list[_Wish]:
    """The shares that lack GPUs, best right first, with what is missing once those before have theirs."""
    wishes = []
    taken = 0
    takers = [share for share in shares if share.needs]
    takers.sort(key=lambda each: (not _by_reserve(each), -each.priority, each.namespace, each.pid))
    for taker in takers:
        free = len(taker.visible - taker.left_out - set(claimed))
        coming = sum(each.coming for each in shares if each is not taker and each.visible <= taker.visible)
        available = free + coming - taken
        spare = sum(pool.gpus for giver in _givers(taker, shares) for pool in _gifts(giver))
        is_possible = available + spare >= taker.needs
        wishes.append(_Wish(taker, max(0, taker.needs - available), is_possible))
        taken += taker.needs if is_possible else 0
    return wishes


def _givers(taker: GpuShare, shares: Shares) -> list[GpuShare]:
    others = (each for each in shares if each.pid != taker.pid)
    return [each for each in others if right(taker, each) and _gifts(each)]


def _first_to_give(giver: GpuShare) -> tuple[int, int, str, int]:
    """The lowest priority first, then the most GPUs beyond its reserve."""
    return giver.priority, giver.reserved - len(giver.held), giver.namespace, giver.pid


def _gifts(giver: GpuShare) -> list[GpuPool]:
    """The pools of the workers that it can give, one entry each, in the order in which they go."""
    left = len(giver.held) - giver.coming - giver.reserved
    spare = {pool: pool.ready - 1 for pool in giver.pools}
    gifts = []
    while fitting := [pool for pool in giver.pools if spare[pool] > 0 and pool.gpus <= left]:
        pool = max(fitting, key=lambda each: spare[each])
        spare[pool] -= 1
        left -= pool.gpus
        gifts.append(pool)
    return gifts
