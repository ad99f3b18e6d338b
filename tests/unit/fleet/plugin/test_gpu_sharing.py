"""The fleet's part in sharing GPUs: which of them count as free, and what failed workers ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dynaplan.fleet.gpus import GpuPool, GpuShare, NodeGpus
from dynaplan.fleet.plugin.gpu_sharing import BEING_FREED_S, GpuSharing, SharingBounds
from dynaplan.graph.lifecycle import Worker
from dynaplan.util.errors import DeploymentError
from tests.fakes.circus import FakeClaims
from tests.unit.fleet.rules.graphs import (
    DRAINING,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    box,
    decode,
    graph,
    worker,
)

INVENTORY = box(2)
UUIDS = frozenset(gpu.uuid for gpu in INVENTORY)
FIRST, SECOND = sorted(UUIDS)
BUSY = {1: "71 of 80 GB in use"}


class Published(FakeClaims):
    """The claims of a machine as the test says; keeps what was published last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = NodeGpus(frozenset({FIRST}), frozenset({FIRST}), ())
        self.share = GpuShare("", 0, 0, 0, frozenset())
        self.is_broken = False

    def publish(self, share: Callable[[NodeGpus], GpuShare]) -> None:
        if self.is_broken:
            raise DeploymentError("everybody may remove files")
        self.share = share(self.seen)


class Sharing:
    """A deployment that wants two workers, with the GPUs that the test says."""

    def __init__(self) -> None:
        self.claims, self.now = Published(), 100.0
        base = GpuShare("ns", 1, 0, 0, UUIDS)
        self.sharing = GpuSharing(base, graph(decode()), INVENTORY, self.claims, self)
        self.fleet: tuple[Worker, ...] = (worker("VllmWorker", READY, (0,)),)

    def now_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def bounds(self, busy: Mapping[int, str] = {}, is_new: bool = False, wanted: int = 2) -> SharingBounds:
        return self.sharing.bounds(self.fleet, {"VllmWorker": wanted}, busy, is_new)


def test_a_gpu_that_other_programs_use_is_left_out_once_no_claim_explains_it() -> None:
    sharing = Sharing()
    sharing.bounds(BUSY)
    assert sharing.claims.share.left_out == {SECOND}, "nobody has claimed it lately"
    sharing.claims.seen = replace(sharing.claims.seen, claimed=UUIDS)
    sharing.bounds(BUSY)
    sharing.claims.seen = replace(sharing.claims.seen, claimed=frozenset({FIRST}))
    sharing.now += BEING_FREED_S / 2
    sharing.bounds(BUSY)
    assert sharing.claims.share.left_out == frozenset(), "the driver takes the memory back in its own time"
    sharing.now += BEING_FREED_S
    sharing.bounds(BUSY)
    assert sharing.claims.share.left_out == {SECOND}
    sharing.bounds()
    assert sharing.claims.share.left_out == frozenset()


def test_a_component_that_has_failed_asks_for_nothing_until_it_is_well_or_asked_for_anew() -> None:
    sharing = Sharing()
    ready, second = sharing.fleet[0], worker("VllmWorker_1", FAILED)
    sharing.fleet = (ready, second)
    sharing.bounds(wanted=3)
    sharing.fleet = (ready,)  # the failed one waits for a GPU, to be tried again
    sharing.bounds()
    assert sharing.claims.share.needs == 0
    sharing.fleet = (ready, worker("VllmWorker_1", STARTING, (1,)))
    sharing.bounds(wanted=3)
    assert sharing.claims.share.needs == 0
    sharing.fleet = (ready,)
    sharing.bounds(wanted=1)
    sharing.bounds()
    assert sharing.claims.share.needs == 1
    sharing.fleet = (ready, second)
    sharing.bounds()
    sharing.fleet = (ready,)
    sharing.bounds(is_new=True)
    assert sharing.claims.share.needs == 1


def test_the_gpu_of_a_worker_that_has_just_gone_is_kept_for_the_other_too() -> None:
    sharing = Sharing()
    sharing.fleet = (*sharing.fleet, worker("VllmWorker_1", DRAINING, (1,)))
    taker = GpuShare("two", 2, 5, 0, UUIDS, wants=1, wants_in_all=1)
    sharing.claims.seen = NodeGpus(UUIDS, UUIDS, (taker,))
    assert sharing.bounds().kept == {}
    assert sharing.claims.share.coming == 1
    sharing.fleet = (sharing.fleet[0], worker("VllmWorker_1", STOPPED, (1,)))
    assert sharing.bounds().kept == {1: "kept for deployment 'two' (gpu-priority 5 over 0)"}
    assert sharing.claims.share.coming == 1, "it is claimed until the pass is over"


def test_a_promise_is_published_with_the_decision() -> None:
    sharing = Sharing()
    sharing.fleet = (*sharing.fleet, worker("VllmWorker_1", READY, (1,)))
    taker = GpuShare("two", 2, 5, 0, UUIDS, wants=1, wants_in_all=1)
    sharing.claims.seen = NodeGpus(UUIDS, UUIDS, (taker,))
    why = "deployment 'two' needs its GPU (gpu-priority 5 over 0)"
    assert sharing.bounds().given == {"VllmWorker": why}
    assert sharing.claims.share.promised == 1
    assert sharing.claims.share.pools == (GpuPool("VllmWorker", 1, 1),)
    sharing.claims.is_broken = True
    assert sharing.bounds() == SharingBounds()
