"""The planner's curves for TensorBoard: the original's tags, and the decisions."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Sample
from dynaplan.planner.model.decisions import DecisionRecord
from dynaplan.planner.recorders import event_file
from dynaplan.planner.recorders.appending_file import AppendingFile
from dynaplan.planner.rules.curves import curves_of


class TensorBoardRecorder:
    """Writes one event file into ``log_dir``; see ``dynaplan.planner.ports.Recorder``.

    The step of every scalar is whole seconds since the planner began. A pull without data leaves a gap.
    """

    def __init__(
        self, log_dir: Path, settings: PlannerSettings, wall_time_s: Callable[[], float] = time.time
    ) -> None:
        self._log_dir = log_dir
        self._settings = settings
        self._wall_time_s = wall_time_s
        self._began_s: float | None = None
        self._opened = 0
        self._file = AppendingFile(self._name, lambda: event_file.header(self._wall_time_s()))

    def pulled(self, sample: Sample) -> None:
        """Write the curves of one pull."""
        settings = self._settings
        # Sleepers keep their GPUs.
        prefill_workers = sample.prefill_workers + sample.prefill_asleep
        decode_workers = sample.decode_workers + sample.decode_asleep
        gpus = (
            prefill_workers * settings.prefill_engine_num_gpu
            + decode_workers * settings.decode_engine_num_gpu
        )
        self._write(
            sample.at_s,
            {
                "prefill_queue_size": sample.prefill_queue,
                "average_kv_load": sample.kv_usage,
                "total_queued_requests": sample.waiting_requests,
                "num_prefill_workers": prefill_workers,
                "num_decode_workers": decode_workers,
                "num_gpu": gpus,
            },
        )

    def decided(self, record: DecisionRecord) -> None:
        """Write the curves of one decision, and the grace intervals that are left after it."""
        desired = record.decision.desired
        self._write(
            record.observation.at_s,
            {
                "desired_prefill_workers": desired.prefill,
                "desired_decode_workers": desired.decode,
                "decode_grace_left": record.next_state.decode_grace_left,
                **curves_of(record),
            },
        )

    def close(self) -> None:
        """Close the file; another record would open it again."""
        self._file.close()

    def _write(self, at_s: float, values: Mapping[str, float | None]) -> None:
        if self._began_s is None:
            self._began_s = at_s
        known = {tag: value for tag, value in values.items() if value is not None}
        step = max(0, int(at_s - self._began_s))
        self._file.append(event_file.scalars(self._wall_time_s(), step, known))

    def _name(self) -> Path:
        # A new file each time: a reader stops for ever at a record that was cut off.
        self._opened += 1
        started = int(self._wall_time_s())
        name = f"events.out.tfevents.{started}.{socket.gethostname()}.{os.getpid()}.{self._opened}"
        return self._log_dir / name
