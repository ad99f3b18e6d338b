"""The planner's curves for TensorBoard: the original's tags, and the decisions; event files without protobuf.

An event file is a sequence of TFRecords: length (8 bytes), its masked CRC-32C, the data, its masked CRC-32C,
little endian. The data is a protobuf ``tensorflow.Event``: wall_time 1 (double), step 2 (int64), file_version
3 (string), summary 5; ``Summary.Value``: tag 1 (string), simple_value 2 (float).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.planner.model import DecisionRecord
from dynaplan.planner.recorders.decision_log import AppendingFile
from dynaplan.planner.recorders.gauges import gpus_of, replicas_of, values_of

FILE_VERSION = b"brain.Event:2"
"""The version that the first record of a file states."""


def header(wall_time_s: float) -> bytes:
    """Return the first record of an event file."""
    return _record(_double(1, wall_time_s) + _bytes(3, FILE_VERSION))


def scalars(wall_time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return one record with a scalar for each tag, at a time since the epoch and a step of 0 or more."""
    summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
    return _record(_double(1, wall_time_s) + b"\x10" + _varint(step) + _bytes(5, summary))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of the data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = tuple(_table_entry(value) for value in range(256))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


class TensorBoardRecorder:
    """Writes one event file into ``log_dir``; see ``dynaplan.planner.ports.Recorder``.

    The step of every scalar is whole seconds since the planner began. A pull without data leaves a gap.
    """

    def __init__(self, log_dir: Path, settings: PlannerSettings) -> None:
        self._log_dir = log_dir
        self._settings = settings
        self._began_s: float | None = None
        self._opened = 0
        self._file = AppendingFile(self._name, lambda: header(time.time()))

    def record_sample(self, sample: Sample) -> None:
        replicas = replicas_of(sample)
        self._write(
            sample.at_s,
            {
                "prefill_queue_size": sample.prefill_queue,
                "average_kv_load": sample.kv_usage,
                "total_queued_requests": sample.waiting_requests,
                "num_prefill_workers": replicas.prefill,
                "num_decode_workers": replicas.decode,
                "num_gpu": gpus_of(sample, self._settings),
            },
        )

    def record_decision(self, record: DecisionRecord) -> None:
        """Write the curves of one decision, and the grace intervals that are left after it."""
        desired = record.decision.desired
        self._write(
            record.observation.at_s,
            {
                "desired_prefill_workers": desired.prefill,
                "desired_decode_workers": desired.decode,
                "decode_grace_left": record.next_state.decode_grace_left,
                **values_of(record),
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
        self._file.append(scalars(time.time(), step, known))

    def _name(self) -> Path:
        # A new file each time: a reader stops for ever at a record that was cut off.
        self._opened += 1
        started = int(time.time())
        name = f"events.out.tfevents.{started}.{socket.gethostname()}.{os.getpid()}.{self._opened}"
        return self._log_dir / name
