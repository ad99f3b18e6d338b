"""The planner's gauges, by the names that Dynamo's planner has from 1.2 on."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Sample
from dynaplan.planner.model.decisions import DecisionRecord
from dynaplan.planner.rules.curves import curves_of

PREFIX = "dynamo_planner_"
"""The beginning of every gauge's name."""


class GaugesRecorder:
    """Keeps the newest value of each gauge; see ``dynaplan.planner.ports.Recorder``.

    A gauge without a value in the newest interval is left out. GPU hours are added up from pull to pull.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._last: Sample | None = None
        self._gpu_hours = 0.0
        self._of_decision: Mapping[str, float] = {}

    def pulled(self, sample: Sample) -> None:
        """Count the workers, and the time of their GPUs since the pull before."""
        if self._last:
            passed_s = max(0.0, sample.at_s - self._last.at_s)
            self._gpu_hours += passed_s / 3600 * self._gpus(self._last)
        self._last = sample

    def decided(self, record: DecisionRecord) -> None:
        """Keep the numbers of one interval."""
        self._of_decision = curves_of(record)

    def read(self) -> dict[str, float]:
        """Return the present value of each gauge by its name."""
        numbers = {"gpu_hours": self._gpu_hours, **self._of_decision}
        if self._last:
            # Sleepers are replicas, and keep their GPUs.
            numbers["num_prefill_replicas"] = self._last.prefill_workers + self._last.prefill_asleep
            numbers["num_decode_replicas"] = self._last.decode_workers + self._last.decode_asleep
            if self._last.prefill_queue is not None:
                numbers["prefill_queue_size"] = self._last.prefill_queue
        return {PREFIX + name: value for name, value in numbers.items()}

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _gpus(self, sample: Sample) -> int:
        settings = self._settings
        prefill = sample.prefill_workers + sample.prefill_asleep
        decode = sample.decode_workers + sample.decode_asleep
        return prefill * settings.prefill_engine_num_gpu + decode * settings.decode_engine_num_gpu
