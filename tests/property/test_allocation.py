"""Whatever is asked for, in whatever order: no GPU twice, none that does not exist, none beyond its whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.contract.gpus import Gpu, visible_gpus
from dynaplan.fleet.rules.allocation import check_fits, choose_gpus
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.util.errors import CapacityError

REQUESTS = st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.7, 1, 2, 3, 8])
BOXES = st.integers(0, 12).map(lambda n: tuple(Gpu(index, f"GPU-{index:04x}") for index in range(n)))
UNUSABLE = st.frozensets(st.integers(0, 12), max_size=4)


def check_ownership(inventory: tuple[Gpu, ...], fleet: list[Worker], unusable: frozenset[int]) -> None:
    shares: dict[int, list[float]] = {}
    for worker in fleet:
        assert len(set(worker.gpus)) == len(worker.gpus)
        for index in worker.gpus if worker.state in HOLDS_GPUS else ():
            shares.setdefault(index, []).append(worker.gpu_share)
    assert shares.keys() <= {gpu.index for gpu in inventory} - unusable
    assert all(sum(held) <= 1 + 1e-9 for held in shares.values())
    assert all(len(set(held)) == 1 for held in shares.values())


@given(BOXES, UNUSABLE, st.lists(st.tuples(REQUESTS, st.sampled_from(WorkerState)), max_size=20))
def test_no_gpu_is_owned_twice_and_every_owned_one_exists(
    inventory: tuple[Gpu, ...], unusable: frozenset[int], asked: list[tuple[float, WorkerState]]
) -> None:
    fleet: list[Worker] = []
    for number, (gpus, state) in enumerate(asked):
        choice = choose_gpus(inventory, fleet, unusable, gpus)
        if choice is None:
            continue
        assert sum(choice[1] for _ in choice[0]) == gpus
        fleet.append(Worker(f"w_{number}", "w", Role.SERVICE, state, choice[0], choice[1]))
        check_ownership(inventory, fleet, unusable)


@given(BOXES, UNUSABLE, REQUESTS)
def test_none_means_that_there_really_are_not_enough(
    inventory: tuple[Gpu, ...], unusable: frozenset[int], gpus: float
) -> None:
    free = {gpu.index for gpu in inventory} - unusable
    assert (choose_gpus(inventory, (), unusable, gpus) is None) == (len(free) < gpus)


@given(BOXES, UNUSABLE, st.lists(st.tuples(st.integers(0, 4), REQUESTS), max_size=5), st.randoms())
def test_whether_a_graph_fits_does_not_depend_on_the_order_of_its_services(
    inventory: tuple[Gpu, ...], unusable: frozenset[int], asked: list[tuple[int, float]], random: object
) -> None:
    services = [ServiceSpec(f"S{n}", Role.SERVICE, workers, gpus) for n, (workers, gpus) in enumerate(asked)]

    def fits() -> bool:
        try:
            check_fits(
                GraphSpec("g:S", "/", "ns", tuple(services)), inventory, dict.fromkeys(unusable, "taken")
            )
        except CapacityError:
            return False
        return True

    first = fits()
    random.shuffle(services)  # type: ignore[attr-defined]
    assert fits() == first


ENTRIES = st.sampled_from(["0", "1", "2", "7", "-1", "", " 3", "GPU-0001", "GPU-000", "GPU-9", "MIG-1", "x"])


@given(BOXES, st.none() | st.lists(ENTRIES).map(",".join))
def test_a_mask_never_shows_a_gpu_that_does_not_exist_nor_one_twice(
    inventory: tuple[Gpu, ...], mask: str | None
) -> None:
    visible = visible_gpus(inventory, mask)
    assert set(visible) <= set(inventory)
    assert len(set(visible)) == len(visible)
