"""The stock of GPUs at the start: which ones are there, and which ones somebody else has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from dynaplan.fleet import local_host
from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.rules.busy_gpus import busy_gpus, by_reason

FREED_WITHIN_S = 5.0
"""Time in which a driver takes back the memory of processes that were killed a moment ago, in seconds."""

POLL_S = 0.1


def in_use(gpus: Sequence[Gpu], claimed: Iterable[int], waits_s: float = 0.0) -> dict[int, str]:
    """Return the GPUs whose memory others use: index -> the holder, in words.

    ``claimed`` are left out: other deployments have them. Waits ``waits_s`` seconds for memory to be freed.
    """
    read = local_host.gpu_uses(gpus)
    unclaimed = [gpu for gpu in gpus if gpu.index not in set(claimed)]
    until_s = time.monotonic() + waits_s
    while (busy := busy_gpus(unclaimed, read())) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return busy


def notes(
    gpus: Sequence[Gpu], claimed: Mapping[int, str], busy: Mapping[int, str], uses_busy: bool
) -> list[str]:
    """Return a line for each reason for which GPUs are left out, or, by ``--use-busy-gpus``, are not."""
    fate = "used all the same (--use-busy-gpus)" if uses_busy else "left out"
    lines = [f"{line}: left out" for line in by_reason(claimed, gpus)]
    return lines + [f"{line}: {fate}" for line in by_reason(busy, gpus)]
