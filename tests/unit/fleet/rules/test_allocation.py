"""Which GPUs a worker gets. Golden vectors: the original's allocator, where it did not invent GPUs."""

from __future__ import annotations

import pytest

from dynaplan.contract.gpus import Gpu, visible_gpus
from dynaplan.fleet.rules.allocation import check_fits, choose_gpus, gpu_map, worker_environment
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import ServiceSpec
from dynaplan.util.errors import CapacityError, ConfigError
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, box, decode, graph, prefill, worker

NOBODY: dict[int, str] = {}


def assign(gpus: int, *requests: float) -> list[tuple[int, ...] | None]:
    """What one request after the other gets on a fresh box."""
    fleet: list[Worker] = []
    given: list[tuple[int, ...] | None] = []
    for number, request in enumerate(requests):
        choice = choose_gpus(box(gpus), fleet, NOBODY, request)
        given.append(choice[0] if choice else None)
        if choice:
            fleet.append(worker(f"VllmWorker_{number}", gpus=choice[0], share=choice[1]))
    return given


@pytest.mark.parametrize(
    ("requests", "given"),
    [
        ((0.5, 0.5, 0.5), [(0,), (0,), (1,)]),
        ((0.3, 0.3, 0.3, 0.3), [(0,), (0,), (0,), (1,)]),
        ((0.7, 0.5, 0.3), [(0,), (1,), (2,)]),
        ((0.5, 1, 0.5, 2), [(0,), (1,), (0,), (2, 3)]),
        ((2, 2), [(0, 1), (2, 3)]),
        ((0, 1), [(), (0,)]),
        ((0.1,) * 11, [(0,)] * 10 + [(1,)]),
    ],
)
def test_gives_the_gpus_that_the_original_gave(
    requests: tuple[float, ...], given: list[tuple[int, ...]]
) -> None:
    assert assign(4, *requests) == given


@pytest.mark.parametrize("requests", [(2, 2, 1), (0.5, 1, 0.5, 2, 1), (4, 0.5), (5,)])
def test_never_invents_a_gpu(requests: tuple[float, ...]) -> None:
    assert assign(4, *requests)[-1] is None


def test_a_fraction_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole number"):
        choose_gpus(box(4), (), NOBODY, 1.5)


@pytest.mark.parametrize(("state", "index"), [(DRAINING, 1), (BACKOFF, 1), (FAILED, 0)])
def test_gpus_are_free_only_when_their_worker_can_no_longer_use_them(state: object, index: int) -> None:
    fleet = (worker("VllmWorker", state, gpus=(0,)),)  # type: ignore[arg-type]
    assert choose_gpus(box(2), fleet, NOBODY, 1) == ((index,), 1.0)


def test_free_gpus_are_counted_as_numbers_not_as_texts() -> None:
    fleet = (worker("VllmWorker", gpus=tuple(range(9))), worker("VllmWorker_1", gpus=(11,)))
    assert choose_gpus(box(12), fleet, NOBODY, 2) == ((9, 10), 1.0)


def test_gpus_of_others_are_left_alone() -> None:
    assert choose_gpus(box(4), (), frozenset({0, 2}), 2) == ((1, 3), 1.0)
    assert choose_gpus(box(4), (), frozenset({0, 2}), 0.5) == ((1,), 0.5)


def test_a_graph_that_does_not_fit_is_refused_with_asks_existing_and_advice() -> None:
    with pytest.raises(CapacityError) as error:
        check_fits(graph(decode(3, 2), prefill(2, 1)), box(4), {3: "claimed by deployment 'two'"})
    text = str(error.value)
    assert "VllmWorker 3 x 2" in text
    assert "PrefillWorker 2 x 1" in text
    assert "4 visible; GPU 3: claimed by deployment 'two'" in text
    assert "--use-busy-gpus" not in text
    assert "ServiceArgs" in text


def test_a_graph_that_fits_to_the_last_gpu_does_not_raise() -> None:
    check_fits(graph(decode(1, 2), prefill(2, 0.5), ServiceSpec("Frontend", Role.FRONTEND)), box(3), NOBODY)


def test_a_service_in_the_process_of_another_needs_no_gpu_and_does_not_raise() -> None:
    router = ServiceSpec("Router", Role.SERVICE, gpus=4, in_process_of="Frontend")
    check_fits(graph(router, decode()), box(1), NOBODY)


def test_the_gpu_map_shows_every_worker_and_every_gpu() -> None:
    frontend = ServiceSpec("Frontend", Role.FRONTEND)
    inventory = (*box(3), Gpu(3, "GPU-1a2b3c4d-0000-0000-0000-000000000000", "NVIDIA H100", 80 * 2**30))
    text = gpu_map(
        graph(frontend, decode(2), prefill(1, 0.5)), inventory, {0: "in use by pid 1"}, {"VllmWorker": "m"}
    )
    assert text.splitlines() == [
        "WORKER                ROLE      GPUS     MODEL",
        "dynamo_Frontend       frontend  -",
        "dynamo_VllmWorker     decode    1        m",
        "dynamo_VllmWorker_1   decode    2        m",
        "dynamo_PrefillWorker  prefill   3 (0.5)",
        "",
        "GPU  NAME         MEMORY  UUID          GOES TO",
        "0    -            -       GPU-SIM-0     in use by pid 1",
        "1    -            -       GPU-SIM-1     dynamo_VllmWorker",
        "2    -            -       GPU-SIM-2     dynamo_VllmWorker_1",
        "3    NVIDIA H100  80 GiB  GPU-1a2b3c4d  dynamo_PrefillWorker",
    ]
    assert gpu_map(graph(decode(1)), box(2), {}, {}).splitlines()[-1].endswith("free")
    assert "NAME" not in gpu_map(graph(frontend), (), {}, {})


def test_where_gpus_stand_for_cores_the_map_has_the_workers_alone() -> None:
    text = gpu_map(graph(decode(1)), box(2), {}, {"VllmWorker": "m"}, has_gpus=False)
    assert text.splitlines() == [
        "WORKER             ROLE    GPUS  MODEL",
        "dynamo_VllmWorker  decode  -     m",
    ]


def test_the_gpu_map_says_what_does_not_fit() -> None:
    assert "does not fit" in gpu_map(graph(decode(2)), box(1), NOBODY, {})


REAL = (Gpu(0, "GPU-aaa1"), Gpu(1, "GPU-aab2"), Gpu(2, "GPU-ccc3"), Gpu(3, "MIG-ddd4"))


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,-1,1", [0]),
        ("1,9,0", [1]),
        ("GPU-ccc3,GPU-aaa", [2, 0]),
        ("GPU-aa", []),
        ("GPU-c,MIG-ddd4", [2, 3]),
        ("MIG-nothere,0", []),
        ("0,1,0", []),
        ("NoDevFiles", []),
        ("0,,1", [0]),
    ],
)
def test_the_mask_is_read_as_the_driver_reads_it(mask: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(REAL, mask)] == indices


def test_workers_get_uuids_and_their_own_variables() -> None:
    environment = worker_environment(worker("VllmWorker_1", gpus=(2, 0)), REAL, {"HF_HOME": "/models"})
    assert environment == {
        "HF_HOME": "/models",
        "DYNAPLAN_WORKER_NAME": "dynamo_VllmWorker_1",
        "DYNAPLAN_GPUS": "2",
        "CUDA_VISIBLE_DEVICES": "GPU-ccc3,GPU-aaa1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    mask = {"CUDA_VISIBLE_DEVICES": "2,0"}
    masked = worker_environment(worker("VllmWorker_1", gpus=(0, 2)), REAL, mask)
    assert masked["CUDA_VISIBLE_DEVICES"] == "2,0", "its owner's stands"
    sees_more = worker_environment(worker("VllmWorker_1", gpus=(1,)), REAL, {}, visible=(0, 1))
    assert sees_more["CUDA_VISIBLE_DEVICES"].count(",") == 1
    without = worker_environment(worker("VllmWorker"), REAL, {})
    assert (without["DYNAPLAN_GPUS"], "CUDA_VISIBLE_DEVICES" in without) == ("0", False)
    half = worker_environment(worker("VllmWorker", gpus=(1,), share=0.5), REAL, {})
    assert half["DYNAPLAN_GPUS"] == "0.5"
