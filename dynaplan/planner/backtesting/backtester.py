"""The backtester of a live planner: it computes in a process of its own, at low priority."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.backtesting.backtest import backtest
from dynaplan.planner.backtesting.runs import KeptRuns
from dynaplan.planner.backtesting.schedule import BacktestSchedule, Question
from dynaplan.planner.model import BacktestResult, Observation, PlannerState
from dynaplan.planner.rules.decision import backtest_basis
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.planner.timing import BACKTEST_DEADLINE_S
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess
from dynaplan.process.helper_main import become_helper

log = logging.getLogger(__name__)

MAIN = "dynaplan.planner.backtesting.backtester"
"""The module that the process runs."""

MAX_MEMORY_BYTES = 2 << 30
"""Address space of the process: 100,000 requests take 200 MB."""

NICENESS = 10
"""The process gets a tenth of a core that others want whole: at 19 it would be late on every busy box."""


class BacktestAnswer(msgspec.Struct):
    """What the process answers: the backtest, and the seconds of CPU time that it took."""

    backtest: BacktestResult
    cpu_s: float


class BacktestProcess:
    """The process that computes the backtests of ``planners`` planners, one after another.

    Each planner's schedule spends a whole share of a core, so the time of a backtest counts ``planners``
    times.
    """

    def __init__(self, planners: int = 1) -> None:
        limits = HelperLimits(BACKTEST_DEADLINE_S, MAX_MEMORY_BYTES)
        self._helper = HelperProcess(MAIN, (), limits)
        self._planners = planners
        self._turn = asyncio.Lock()

    async def ask(self, settings: PlannerSettings, question: Question) -> BacktestAnswer:
        """Return the answer to a question, once those before it are answered. Raises BacktestFailed."""
        async with self._turn:
            begun_s = time.monotonic()
            try:
                _, answer = await self._helper.ask(settings.to_options(), msgspec.json.encode(question))
                found = msgspec.json.decode(answer, type=BacktestAnswer)
            except (HelperFailed, msgspec.MsgspecError) as error:
                took_s = time.monotonic() - begun_s  # of a core at most what it took by the clock
                raise BacktestFailed(str(error), took_s * self._planners) from error
        return BacktestAnswer(found.backtest, found.cpu_s * self._planners)

    async def close(self) -> None:
        await self._helper.close()


class BacktestFailed(Exception):
    """A backtest was not computed, and took ``took_s`` seconds of CPU time at most."""

    def __init__(self, why: str, took_s: float) -> None:
        super().__init__(why)
        self.took_s = took_s


class LiveBacktester:
    """Adds each interval to the evidence, and has backtests computed while planning continues."""

    def __init__(
        self, settings: PlannerSettings, schedule: BacktestSchedule, process: BacktestProcess | None = None
    ) -> None:
        self._settings = settings
        self._schedule = schedule
        self._process = process or BacktestProcess()
        self._running: asyncio.Task[None] | None = None
        self._failure = ""

    def observe(self, observation: Observation, state: PlannerState) -> BacktestResult:
        """Add the interval to the evidence, begin a backtest if one is due, and return the answer that holds.

        While the fleet is not known none begins, and the result has no workers: an answer waits until it can
        count.
        """
        schedule = self._schedule
        schedule.add(observation)
        if observation.unknown:
            return BacktestResult(missing=observation.unknown)
        present, limits = backtest_basis(self._settings, observation)
        if question := schedule.question(observation, state, limits, present):
            self._running = asyncio.create_task(self._ask(question, observation.at_s), name="backtest")
        return schedule.answer(observation)

    async def close(self) -> None:
        """Kill the process; a backtest that is being computed is lost."""
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._process.close()

    async def _ask(self, question: Question, at_s: float) -> None:
        try:
            found = await self._process.ask(self._settings, question)
        except BacktestFailed as error:
            self._fail(f"the backtest was not computed: {error}", at_s, error.took_s)
            return
        self._failure = ""
        self._schedule.note(question, found.backtest, at_s, found.cpu_s)

    def _fail(self, why: str, at_s: float, took_s: float) -> None:
        if why != self._failure:
            log.warning("%s; the last one holds, and no worker is removed", why)
        self._failure = why
        self._schedule.fail(why, at_s, took_s)


def main(arguments: Sequence[str]) -> None:
    """Compute a backtest for each question."""
    channel, _ = become_helper(arguments)
    os.nice(NICENESS)
    runs: defaultdict[bytes, KeptRuns] = defaultdict(KeptRuns)
    for options, payload in channel:
        planner = msgspec.json.encode(options)
        channel.answer({}, answer(options, payload, runs[planner]))


def answer(options: dict[str, Any], payload: bytes, runs: KeptRuns) -> bytes:
    """Return the ``BacktestAnswer`` to a ``Question``, both as JSON; ``runs`` are kept between questions."""
    begun_s = time.process_time()
    settings = PlannerSettings.from_options(options)
    question = msgspec.json.decode(payload, type=Question)
    found = backtest(build_sla_model(settings), settings, question, runs)
    return msgspec.json.encode(BacktestAnswer(found, time.process_time() - begun_s))


if __name__ == "__main__":
    main(sys.argv[1:])
