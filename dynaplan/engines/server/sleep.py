"""The sleep of an engine: whether it is paused, and how it is put to sleep and woken."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace

from dynaplan.engines.server.client import ServerClient, UnexpectedStatus
from dynaplan.engines.server.metrics import EngineMetrics
from dynaplan.util.errors import TemporaryError

log = logging.getLogger(__name__)

SLEEP_TIMEOUT_S = 120.0
"""Seconds that falling asleep or waking may take: a large model moves to host memory or back."""

PAUSED_TIMEOUT_S = 2.0
"""Seconds that the engine may take to say whether it is paused."""


@dataclass(frozen=True)
class SleepPaths:
    """The paths by which an engine is put to sleep and woken, and a paused one goes on; all are posted to.

    ``paused_path`` answers a GET with ``{"is_paused": true}``. An engine that lacks a path (404) says by
    ``hint`` what its server needs.
    """

    sleep_path: str
    wake_path: str
    resume_path: str
    paused_path: str
    hint: str


class EngineSleep:
    """Asks one engine whether it is paused, which its metrics do not tell, and wakes it."""

    def __init__(self, waking: SleepPaths | None, client: ServerClient) -> None:
        self._paths = waking
        self._client = client
        self._reports_pause: bool | None = None if waking else False
        self._is_paused = False
        self._sleeps_by_metrics = False

    async def with_pause(self, signals: EngineMetrics) -> EngineMetrics:
        """Return the signals, asleep also when the engine is paused; asks it, if it has that path."""
        self._sleeps_by_metrics = signals.is_asleep
        if self._reports_pause is not False:
            await self._read_paused()
        return replace(signals, is_asleep=signals.is_asleep or self._is_paused)

    async def sleep(self, level: str) -> str:
        if self._paths is None:
            return "it has no way to sleep."
        return await self._command(f"{self._paths.sleep_path}?level={level}")

    async def wake(self, signals: EngineMetrics) -> str:
        if self._paths is None or not signals.is_asleep:
            return ""
        if not signals.has_weights:
            return "It sleeps without its weights (level 2): load them and wake it as you put it to sleep."
        # vLLM 0.32 says that it is paused while it sleeps, too; resumed it would compute without its weights.
        is_paused_only = self._is_paused and not self._sleeps_by_metrics
        path = self._paths.resume_path if is_paused_only else self._paths.wake_path
        return await self._command(path)

    async def _command(self, path: str) -> str:
        assert self._paths
        log.info("POST %s to the engine", path)
        try:
            status = await self._client.command(path, SLEEP_TIMEOUT_S)
        except TemporaryError as error:
            return str(error)
        if status == 404:
            return f"It has no {path}. {self._paths.hint}"
        return "" if status == 200 else f"{path} of the engine answered {status}."

    async def _read_paused(self) -> None:
        """Ask the engine whether it is paused; without an answer the last one holds.

        An engine whose first answer does not say so is not asked again.
        """
        assert self._paths
        try:
            answer = json.loads(await self._client.text(self._paths.paused_path, PAUSED_TIMEOUT_S))
            self._is_paused = isinstance(answer, dict) and answer.get("is_paused") is True
            self._reports_pause = True
        except (UnexpectedStatus, ValueError, RecursionError) as error:
            log.debug("the engine does not say whether it is paused: %s", error)
            self._reports_pause = self._reports_pause or False
        except TemporaryError as error:
            log.debug("whether the engine is paused is not known: %s", error)
