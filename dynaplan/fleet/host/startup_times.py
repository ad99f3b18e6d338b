"""The learnt start-up times, in a file beside the statefiles. A cache: losing it costs nothing."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from dynaplan.fleet.rules.startup_times import Times, learnt, times_from_json

log = logging.getLogger(__name__)

FILE_NAME = ".startup_times.json"
"""Begins as no namespace does: the other files there are named after namespaces."""


class StartupTimesFile:
    """Shared by all deployments of the directory; when two write at once, one time is lost."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME

    def read(self) -> Times:
        """Return the learnt times; none when the file is missing, unreadable or spoilt."""
        try:
            return times_from_json(self._path.read_text())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def learn(self, key: str, seconds: float) -> None:
        """Remember one start; a time that cannot be written is forgotten."""
        temporary = self._path.with_name(f"{FILE_NAME}.{os.getpid()}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600), "w") as file:
                file.write(json.dumps(learnt(self.read(), key, seconds)))
            os.replace(temporary, self._path)
        except OSError as error:
            log.info("a start-up time is not remembered: %s", error)
            temporary.unlink(missing_ok=True)
