"""From which use of its memory on a GPU is left out, and how that is said."""

from __future__ import annotations

import pytest

from dynaplan.contract.gpus import (
    UNREADABLE,
    Gpu,
    GpuProcess,
    GpuUse,
    busy_gpus,
    by_reason,
    is_busy,
    use_in_words,
)
from dynaplan.util.amounts import GIB

H100 = Gpu(2, "GPU-2", "H100", 80 * GIB)
SMALL = Gpu(0, "GPU-0", "small", 8 * GIB)


@pytest.mark.parametrize(
    ("gpu", "used_gb", "busy"),
    [
        (H100, 0.6, False),  # an idle driver
        (H100, 7.9, False),
        (H100, 8.1, True),  # vLLM's default of 90 % does not fit any more
        (SMALL, 1.5, False),  # a desktop
        (SMALL, 2.1, True),
    ],
)
def test_a_gpu_is_busy_from_a_tenth_of_its_memory_on_or_two_gb_of_a_small_one(
    gpu: Gpu, used_gb: float, busy: bool
) -> None:
    assert is_busy(gpu, GpuUse(int(used_gb * GIB))) is busy


def test_a_gpu_that_does_not_tell_its_memory_is_not_busy() -> None:
    assert not is_busy(Gpu(0, "GPU-0"), GpuUse(2**40))
    assert busy_gpus((Gpu(2, "GPU-2"), SMALL), {0: GpuUse(0)}) == {}


def test_a_gpu_that_was_not_read_although_others_were_is_not_handed_out() -> None:
    assert busy_gpus((H100, SMALL), {0: GpuUse(0)}) == {2: UNREADABLE}
    assert busy_gpus((H100, SMALL), {}) == {}, "the driver does not answer: that is no fault of a GPU"


def test_the_processes_are_named_as_far_as_they_are_known() -> None:
    def said(*processes: GpuProcess) -> str:
        return use_in_words(H100, GpuUse(71 * GIB, processes))

    assert said(GpuProcess(4711, "python", 1001)) == "71 of 80 GiB in use by pid 4711 (python, uid 1001)"
    assert said(GpuProcess(4711)) == "71 of 80 GiB in use by pid 4711"
    assert said() == said(GpuProcess(0)) == "71 of 80 GiB in use by a process that cannot be seen from here"
    assert said(*(GpuProcess(pid) for pid in range(1, 6))).endswith("by pid 1, pid 2, pid 3 and 2 more")
    assert busy_gpus((SMALL, H100), {0: GpuUse(), 2: GpuUse(71 * GIB, (GpuProcess(1, "x", 0),))}) == {
        2: "71 of 80 GiB in use by pid 1 (x, uid 0)"
    }


def test_gpus_with_one_reason_share_a_line() -> None:
    inventory = tuple(Gpu(index, str(index)) for index in range(4))
    assert by_reason({1: "taken", 3: "taken", 2: "in use", 9: "not ours"}, inventory) == [
        "GPU 1,3: taken",
        "GPU 2: in use",
    ]
