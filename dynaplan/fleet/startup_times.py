"""Start-up times of engines, learnt from earlier starts, in a file beside the statefiles.

A cache: losing it costs nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from dynaplan.config.settings.worker import engine_of
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.documents import number_field, parse_object

Times = dict[str, list[float]]
"""The last durations, in seconds, oldest first, of every key that was met."""

KEPT_DURATIONS = 5

MAX_STARTUP_S = 86_400.0
"""A longer time in the file is taken for this one."""


def startup_key(worker: Worker, settings: Mapping[str, Any]) -> str | None:
    """Return the key of a worker's start-up times: engine, model, GPUs; None for a worker without engine.

    ``settings`` is the service's configuration, keys in kebab-case.
    """
    if worker.role not in (Role.DECODE, Role.PREFILL) or not settings.get("model"):
        return None
    return json.dumps([engine_of(settings), str(settings["model"]), worker.gpu_request])


def with_duration(times: Times, key: str, seconds: float) -> Times:
    """Return a copy with ``seconds`` appended under ``key``, the last five kept."""
    return {**times, key: [*times.get(key, ()), round(seconds, 3)][-KEPT_DURATIONS:]}


def median_startup_s(times: Times, key: str | None) -> float | None:
    """Return the usual start-up time, the median of the kept ones, in seconds; None when none is known."""
    known = times.get(key or "")
    return median(known) if known else None


def times_from_json(text: str) -> Times:
    """Read a file's text; raises ValueError when it is not one of ours."""
    document = parse_object(text)
    return {
        key: [min(MAX_STARTUP_S, max(0.0, number_field({key: each}, key))) for each in values]
        for key, values in document.items()
    }


log = logging.getLogger(__name__)

FILE_NAME = ".startup_times.json"
"""Begins as no namespace does: the other files there are named after namespaces."""


class StartupTimes(Protocol):
    """The durations of earlier starts, in seconds, by what they depend on. A cache: it never raises."""

    def read(self) -> dict[str, list[float]]:
        """Return the last durations of every key, oldest first."""
        ...

    def learn(self, key: str, seconds: float) -> None:
        """Add the duration of a start under its key; the oldest of a few is forgotten."""
        ...


class StartupTimesFile:
    """Shared by all deployments of the directory; when two write at once, one time is lost."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME

    @classmethod
    def beside(cls, statefile: Path) -> StartupTimesFile:
        return cls(statefile.parent)

    def read(self) -> Times:
        """Return the learnt times; none when the file is missing, unreadable or spoilt."""
        try:
            return times_from_json(self._path.read_text())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def learn(self, key: str, seconds: float) -> None:
        """Remember one start; a time that cannot be written is forgotten.

        Written in place: a process that is killed meanwhile leaves no second file, at most a spoilt cache.
        """
        text = json.dumps(with_duration(self.read(), key, seconds)).encode()
        try:
            with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(text)
                file.truncate()
        except OSError as error:
            log.info("a start-up time is not remembered: %s", error)
