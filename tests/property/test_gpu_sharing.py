"""Whatever deployments hold, want, reserve and prefer: GPUs change hands a few times, and then stay."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.fleet.gpus import GpuPool, GpuShare
from dynaplan.fleet.rules.gpu_sharing import after, kept_back, right, transfer

BOX = frozenset(f"GPU-{number}" for number in range(8))


class Deployments:
    """Deployments on one box, each of which acts on its own part when it has a turn."""

    def __init__(self, asked: list[tuple[int, int, int, int]], sizes: list[int]) -> None:
        self.wanted: dict[str, int] = {}
        self.size: dict[str, int] = {}
        self.shares: dict[str, GpuShare] = {}
        self.passed: list[tuple[str, str]] = []
        free = sorted(BOX)
        for number, (priority, reserved, wanted, first) in enumerate(asked):
            name = f"ns{number}"
            self.wanted[name], self.size[name] = wanted, sizes[number]
            gpus = min(first, wanted, len(free) // sizes[number]) * sizes[number]
            held, free = frozenset(free[:gpus]), free[gpus:]
            self.shares[name] = GpuShare(name, number, priority, reserved, BOX, held=held)
        for name in self.shares:
            self.publish(name)

    @property
    def all(self) -> tuple[GpuShare, ...]:
        return tuple(self.shares.values())

    @property
    def claimed(self) -> frozenset[str]:
        return frozenset().union(*(share.held for share in self.all))

    def publish(self, name: str) -> None:
        share = self.shares[name]
        size, staying = self.size[name], len(share.held - share.leaving)
        lacks = max(0, self.wanted[name] - staying // size)
        self.shares[name] = replace(
            share,
            pools=(GpuPool("W", size, staying // size),),
            wants=staying + min(lacks, 1) * size,
            wants_in_all=staying + lacks * size,
            promised=0,
        )

    def turn(self, name: str) -> bool:
        """One pass of a fleet keeper; True when anything changed."""
        before = self.shares[name]
        self.publish(name)
        if gone := before.leaving & before.held:
            self.shares[name] = replace(before, held=before.held - gone, leaving=frozenset())
            return True
        self.take(name)
        step = transfer(self.all, self.claimed)
        if step and step.giver.namespace == name:
            self.check(step.giver, step.taker)
            self.passed.append((name, step.taker.namespace))
            leaving = frozenset(sorted(step.giver.held)[-self.size[name] :])
            self.shares[name] = replace(after(step), leaving=leaving)
        return self.shares[name] != before

    def take(self, name: str) -> None:
        share = self.shares[name]
        free = sorted(BOX - self.claimed)
        back = kept_back(share, self.all, self.claimed).number
        lacks = share.wants_in_all - len(share.held - share.leaving)
        gpus = max(0, min(lacks, len(free) - back)) // self.size[name] * self.size[name]
        self.shares[name] = replace(share, held=share.held | set(free[:gpus]))

    def check(self, giver: GpuShare, taker: GpuShare) -> None:
        assert right(taker, giver)
        assert taker.needs
        size = self.size[giver.namespace]
        assert len(giver.held) - size >= max(giver.reserved, size), "beyond its minimum, and one answers"
        assert giver.priority < taker.priority or taker.wants <= taker.reserved
        assert not any(share.coming for share in self.all), "one at a time"
        assert self.claimed >= BOX or giver.visible - self.claimed, "free ones first"


ASKED = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 8), st.integers(0, 8)),
    min_size=2,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(ASKED, st.sampled_from([[1] * 4, [2, 1, 3, 1], [1, 2, 4, 2]]), st.data())
def test_gpus_come_to_rest_and_none_goes_back_and_forth(
    asked: list[tuple[int, int, int, int]], sizes: list[int], data: st.DataObject
) -> None:
    box = Deployments(asked, sizes)
    for _ in range(12):  # any order of turns
        box.turn(data.draw(st.sampled_from(sorted(box.shares))))
    turns = 0
    while sum(box.turn(name) for name in sorted(box.shares)):
        turns += 1
        assert turns < 100, f"it never rests: {box.passed}"
    assert sum(len(share.held) for share in box.all) == len(box.claimed), "no GPU has two owners"
    assert len(box.passed) <= 2 * len(BOX)
    if set(sizes) != {1}:
        return  # What a gift leaves over anybody takes, and gives back to a better right.
    pairs = set(box.passed)
    assert not any((taker, giver) in pairs for giver, taker in pairs), "none is taken back"
    for taker in (share for share in box.all if share.needs):
        assert box.claimed == BOX, "no GPU lies idle beside somebody who lacks one"
        for giver in box.all:
            is_beyond = len(giver.held) > max(1, giver.reserved)
            assert giver is taker or not (right(taker, giver) and is_beyond), "every right is met"


@given(ASKED)
def test_equals_never_take_from_each_other(asked: list[tuple[int, int, int, int]]) -> None:
    box = Deployments([(1, 0, wanted, first) for _, _, wanted, first in asked], [1] * 4)
    assert transfer(box.all, box.claimed) is None
