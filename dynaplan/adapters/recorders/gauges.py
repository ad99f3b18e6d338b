"""The planner's gauges, by the names that Dynamo's planner has from 1.2 on."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.core.planning.curves import curves_of
from dynaplan.domain.planning.decisions import DecisionRecord
from dynaplan.domain.planning.observation import Sample
from dynaplan.domain.settings.planner import PlannerSettings

PREFIX = "dynamo_planner_"


class GaugesRecorder:
    """Keeps the newest value of each; see ``dynaplan.ports.Recorder``.

    What an interval did not tell is not shown. GPU hours count from pull to pull, by the clock.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._last: Sample | None = None
        self._gpu_hours = 0.0
        self._of_decision: Mapping[str, float] = {}

    def pulled(self, sample: Sample) -> None:
        """The workers that are there, and their GPUs since the pull before."""
        if self._last:
            passed_s = max(0.0, sample.at_s - self._last.at_s)
            self._gpu_hours += passed_s / 3600 * self._gpus(self._last)
        self._last = sample

    def decided(self, record: DecisionRecord) -> None:
        """The numbers of one interval."""
        self._of_decision = curves_of(record)

    def read(self) -> dict[str, float]:
        """Name -> value, as they stand now."""
        numbers = {"gpu_hours": self._gpu_hours, **self._of_decision}
        if self._last:
            numbers["num_prefill_replicas"] = self._last.prefill_workers
            numbers["num_decode_replicas"] = self._last.decode_workers
        return {PREFIX + name: value for name, value in numbers.items()}

    def close(self) -> None:
        """Nothing is held."""

    def _gpus(self, sample: Sample) -> int:
        settings = self._settings
        prefill = sample.prefill_workers * settings.prefill_engine_num_gpu
        return prefill + sample.decode_workers * settings.decode_engine_num_gpu
