"""The power limits of GPUs that stood before ours, in a file beside the statefile until they are set again.

Not in the statefile, which goes with its deployment: a limit stays when everything is killed, and the next
``serve`` of the namespace sets it back.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.gpu_devices import power_limits
from dynaplan.util.documents import number_field, parse_object, text_field, whole_field

log = logging.getLogger(__name__)

DRIVER_TIMEOUT_S = 5.0
"""The longest time for which the start and the end wait for the driver, in seconds."""


class EarlierLimits:
    """The power limits, in watts, that GPUs had before dynaplan set its own: ``by_gpu``, kept in a file.

    A GPU whose limit dynaplan has not changed is not in it. One process at a time writes the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_gpu: Mapping[Gpu, float] = _read(path)

    @classmethod
    def beside(cls, statefile: Path) -> EarlierLimits:
        return cls(statefile.with_suffix(".power-limits"))

    @property
    def watts(self) -> dict[int, float]:
        """The earlier limits by GPU index."""
        return {gpu.index: watts for gpu, watts in self.by_gpu.items()}

    def keep(self, by_gpu: Mapping[Gpu, float]) -> None:
        """Replace the earlier limits, in the file too, which is removed without any; raises OSError."""
        if by_gpu == self.by_gpu:
            return
        if by_gpu:
            rows = {str(gpu.index): {"uuid": gpu.uuid, "watts": watts} for gpu, watts in by_gpu.items()}
            new = self._path.with_name(f"{self._path.name}.tmp")
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(rows, file)
            new.replace(self._path)
        else:
            self._path.unlink(missing_ok=True)
        self.by_gpu = dict(by_gpu)


def _read(path: Path) -> dict[Gpu, float]:
    """Return what the file has; nothing where there is none that can be read."""
    try:
        rows = parse_object(path.read_text())
        return {
            Gpu(whole_field({"gpu": int(index)}, "gpu"), text_field(row, "uuid")): number_field(row, "watts")
            for index, row in rows.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the power limits of before cannot be read: %s", error)
        return {}


def set_back(statefile: Path) -> None:
    """Set the GPUs' power limits back to the earlier ones, waiting DRIVER_TIMEOUT_S at most.

    A limit that the driver refuses, or does not set in time, stays in the file.
    """
    earlier = EarlierLimits.beside(statefile)
    if earlier.by_gpu:
        setting = threading.Thread(target=_set_back, args=(earlier,), daemon=True)
        setting.start()
        setting.join(DRIVER_TIMEOUT_S)


def _set_back(earlier: EarlierLimits) -> None:
    driver = power_limits(tuple(earlier.by_gpu))
    present, left = driver.read(), dict(earlier.by_gpu)
    for gpu, watts in earlier.by_gpu.items():
        if gpu.index in present and (why := driver.set(gpu.index, watts)):
            log.warning("the power limit of GPU %d, %g W before, was not set back: %s", gpu.index, watts, why)
        elif gpu.index in present:
            del left[gpu]
    with suppress(OSError):
        earlier.keep(left)
