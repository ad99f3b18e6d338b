"""When a GPU is ill, and what becomes of it: set apart, readmitted, or kept although it is ill.

Symptoms, from the driver's counters and events (``GpuHealth``) and from the ends of engines:

| symptom | passes by itself |
|---|---|
| it has fallen off the bus | no |
| an Xid of the hardware or of the driver's own processor (``XIDS``) | no |
| uncorrected errors of its memory (ECC), more than before | no |
| a row of its memory could not be remapped | no |
| at work its clock stays below half of its best for ``SLOW_S``, and neither heat nor power says why | no |
| as hot as the driver slows down at, for ``HOT_S`` | yes |
| ``DEATHS`` ends of engines in ``DEATHS_S`` while engines of the same service live on other GPUs | no |

A GPU with a symptom is set apart: workers leave it as a reserved one. One that passes by itself is readmitted
when it has passed, at the earliest after ``FIRST_RETRY_S``, twice as long each time. Every other one is
readmitted by a person, and the symptom of before does not count again; a further one does. The last GPU that
a decode worker could have is not set apart: it is told that it is ill.

Not a symptom: an Xid that a program causes (13, 31, 43, 45, 69), memory errors that the driver has contained
(94), and rows that wait for a reset to be remapped. Sources: NVIDIA's Xid catalog (docs.nvidia.com/deploy/
xid-errors), whose "immediate action" for these is a reset of the GPU or more; the guide on row remapping;
NVML's reference on ``nvmlClocksEventReasons``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dynaplan.contract.gpu_standing import GpuStanding, GpuStandings
from dynaplan.contract.gpus import GpuHealth
from dynaplan.graph.lifecycle import Worker, WorkerState

XIDS: Mapping[int, str] = {
    46: "the GPU has stopped processing",
    48: "an uncorrectable error of its memory",
    62: "its microcontroller has halted",
    64: "a row of its memory could not be remapped",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    95: "an uncontained error of its memory",
    110: "a security fault",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an unrecovered error of its memory",
    143: "it could not be initialised",
}
"""Events of the driver after which the GPU needs a reset or a repair, with what they mean."""

HOT_S = 10.0
SLOW_S = 60.0
"""Times for which heat, and a low clock at work, have to last, in seconds."""

COOLER_CELSIUS = 5.0
"""A GPU is hot until it is so much cooler than the temperature at which it is slowed down."""

DEATHS, DEATHS_S = 3, 600.0

FIRST_RETRY_S, LONGEST_RETRY_S = 60.0, 3600.0


@dataclass(frozen=True)
class Symptom:
    """Why a GPU is ill: ``key`` differs for every further occurrence."""

    key: str
    why: str
    passes: bool = False


class HealthJudge:
    """Finds the symptoms of GPUs in successive readings and ends of engines. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._lasting_since_s: dict[tuple[int, str], float] = {}
        self._deaths: list[tuple[float, int, str]] = []

    def note_ends(self, before: Iterable[Worker], after: Mapping[str, Worker], now_s: float) -> None:
        """Remember the engines that have ended unasked between two looks at the fleet."""
        for worker in before:
            now = after.get(worker.name)
            if worker.gpus and now and worker.state is not now.state and now.state in _ENDED:
                self._deaths += [(now_s, index, worker.component) for index in worker.gpus]
        self._deaths = [each for each in self._deaths if each[0] > now_s - DEATHS_S]

    def symptoms(
        self, readings: Mapping[int, GpuHealth], fleet: Collection[Worker], now_s: float
    ) -> dict[int, Symptom]:
        """Return the ill GPUs, each with its gravest symptom."""
        found = {
            index: symptom
            for index in {each[1] for each in self._deaths}
            if (symptom := self._dying(index, fleet))
        }
        for index, reading in readings.items():
            hot = self._lasts(
                index, "hot", _is_hot(reading, (index, "hot") in self._lasting_since_s), HOT_S, now_s
            )
            slow = self._lasts(index, "slow", _is_slow(reading), SLOW_S, now_s)
            if symptom := _symptom(reading, is_hot=hot, is_slow=slow):
                found[index] = symptom
        return found

    def _lasts(self, index: int, name: str, is_so: bool, least_s: float, now_s: float) -> bool:
        if not is_so:
            self._lasting_since_s.pop((index, name), None)
            return False
        return now_s - self._lasting_since_s.setdefault((index, name), now_s) >= least_s

    def _dying(self, index: int, fleet: Collection[Worker]) -> Symptom | None:
        ends = [(at_s, component) for at_s, gpu, component in self._deaths if gpu == index]
        elsewhere = {gpu for _, gpu, _ in self._deaths} - {index}
        lives = any(
            worker.state is WorkerState.READY
            and worker.component in {component for _, component in ends}
            and not {index, *elsewhere} & set(worker.gpus)
            for worker in fleet
        )
        if len(ends) < DEATHS or not lives:
            return None
        return Symptom(
            f"ends {ends[-1][0]:.0f}", f"{len(ends)} engines ended on it, and others live on other GPUs"
        )


_ENDED = (WorkerState.BACKOFF, WorkerState.FAILED)


def _symptom(reading: GpuHealth, *, is_hot: bool, is_slow: bool) -> Symptom | None:
    xids = [number for number in reading.xids if number in XIDS]
    if reading.is_lost:
        return Symptom("lost", "it has fallen off the bus")
    if xids:
        return Symptom(f"xid {xids[-1]} {len(xids)}", f"Xid {xids[-1]}, {XIDS[xids[-1]]}")
    if reading.has_remap_failed:
        return Symptom("remap", "a row of its memory could not be remapped")
    if reading.uncorrected_errors:
        errors = reading.uncorrected_errors
        return Symptom(f"ecc {errors}", f"{errors} uncorrected errors of its memory (ECC)")
    if is_hot:
        return Symptom(
            "hot", f"{reading.celsius:.0f} C, and it is slowed down at {reading.slowdown_celsius:.0f} C", True
        )
    if is_slow:
        return Symptom(
            "slow", f"at work its clock stays at {reading.clock_mhz} of {reading.max_clock_mhz} MHz"
        )
    return None


def _is_hot(reading: GpuHealth, was_hot: bool) -> bool:
    if reading.celsius is None or not reading.slowdown_celsius:
        return False
    return reading.celsius >= reading.slowdown_celsius - (COOLER_CELSIUS if was_hot else 0.0)


def _is_slow(reading: GpuHealth) -> bool:
    works = reading.utilisation is not None and reading.utilisation >= 0.5
    return works and not reading.is_throttled and 0 < reading.clock_mhz < reading.max_clock_mhz / 2


def judged(
    standings: GpuStandings,
    symptoms: Mapping[int, Symptom],
    usable: Collection[int],
    least_left: float,
    now_unix_s: float,
) -> GpuStandings:
    """Return which GPUs are set apart now, by the ``symptoms`` that were found, and by ``standings`` before.

    ``usable`` are the GPUs that workers may have but for illness; none is set apart where fewer than
    ``least_left`` of them would be left. Without any change ``standings`` itself is returned.
    """
    for index in sorted(symptoms.keys() | standings.by_gpu.keys()):
        before = standings.by_gpu.get(index, GpuStanding(is_apart=False, times=0))
        symptom = symptoms.get(index)
        left = len(set(usable) - standings.apart.keys() - {index})
        after = _judged(before, symptom, now_unix_s, is_last=left < least_left)
        if after != before:
            standings = standings.with_gpu(index, after)
    return standings


def _judged(before: GpuStanding, symptom: Symptom | None, now_unix_s: float, *, is_last: bool) -> GpuStanding:
    if before.is_apart:
        is_over = 0 < before.retry_unix_s <= now_unix_s and symptom is None
        return replace(before, is_apart=False, why="", symptom="", retry_unix_s=0.0) if is_over else before
    if symptom is None or symptom.key in before.accepted:
        return replace(before, why="", symptom="") if before.why else before
    if is_last:
        return (
            before if before.symptom == symptom.key else replace(before, why=symptom.why, symptom=symptom.key)
        )
    times = before.times + 1
    retry_s = min(FIRST_RETRY_S * 2 ** (times - 1), LONGEST_RETRY_S)
    return replace(
        before,
        is_apart=True,
        why=symptom.why,
        symptom=symptom.key,
        since_unix_s=round(now_unix_s, 3),
        retry_unix_s=round(now_unix_s + retry_s, 3) if symptom.passes else 0.0,
        times=times,
    )


def changes(before: GpuStandings, after: GpuStandings) -> list[str]:
    """Return a sentence for each GPU that was set apart, readmitted, or is ill and the last."""
    lines = []
    for index, why in after.apart.items():
        if index not in before.apart:
            lines.append(f"GPU {index} is {why}. `dynaplan gpus --readmit {index}` takes it back.")
    for index in before.apart.keys() - after.apart.keys():
        lines.append(f"GPU {index} is in use again.")
    for index, why in after.ill_in_use.items():
        if before.ill_in_use.get(index) != why:
            lines.append(
                f"GPU {index} is ill ({why}) and stays in use: no other is left for a decode worker."
            )
    return lines
