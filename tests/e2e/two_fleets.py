"""One graph on both sides, served and simulated, with the same settings, trace and phase of the planner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import Result
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.replay import Seen, percentile, replay
from tests.fakes.polling import eventually

PROFILE = {
    "prefill_isl": [100, 4000],
    "prefill_ttft": [40, 430],
    "prefill_thpt_per_gpu": [2500, 9300],
    "x_kv_usage": [0, 1, 0, 1],
    "y_context_length": [100, 100, 4000, 4000],
    "z_itl": [20, 40, 20, 40],
    "z_thpt_per_gpu": [1000, 1000, 1000, 1000],
    "max_kv_tokens": 16384,
}
"""Steps of 20 ms and more: long against what a busy machine adds to them."""

ENGINE = {"block-size": 64, "max-num-batched-tokens": 16384, "max-model-len": 4096}
GPUS = 4

ALONE = [TracedRequest(0.3 * number, 800, 2) for number in range(6)]
"""Requests that wait for nobody."""

BUSY = {"path_ms": 40.0, "lag_ms": 50.0, "startup_s": 3.0}
"""What a run measures on a machine that is busier than that is the machine."""

Event = tuple[float, Mapping[str, int]]
"""Seconds since the trace began, and the workers that were asked for, by role."""


@dataclass
class Live:
    """What one run of ``dynaplan serve`` came to.

    ``path_ms`` is what requests that are alone take longer than simulated: their way between processes.
    ``startup_s`` is from a decision until its workers were ready, on average.
    """

    seen: Sequence[Seen]
    events: Sequence[Event]
    startup_s: float
    path_ms: float

    @property
    def lag_ms(self) -> float:
        """How late nearly all requests were sent at most."""
        return percentile((1000 * each.lag_s for each in self.seen), 95)

    @property
    def is_valid(self) -> bool:
        """Whether the machine had time for it."""
        return all(getattr(self, name) <= most for name, most in BUSY.items())

    def __str__(self) -> str:
        return f"path {self.path_ms:.0f} ms, lag {self.lag_ms:.0f} ms, start-up {self.startup_s:.1f} s"


class TwoFleets:
    """``mode`` is agg or disagg, ``planner`` holds the planner's options, ``arguments`` those of serve.

    ``wait_s`` is how long a request waits for its remote prefill.
    """

    def __init__(self, directory: Path, mode: str, planner: Mapping[str, Any], wait_s: float = 30.0) -> None:
        self._wait_s = wait_s
        self._directory = directory
        self._is_disaggregated = mode == "disagg"
        self._planner = planner
        profile = directory / "profile.json"
        profile.write_text(json.dumps(PROFILE))
        self._engine = {**ENGINE, "profile": str(profile)}
        self.arguments = (f"graphs.{mode}:Frontend", f"{mode}.yaml", "--gpus", str(GPUS), *self._options())

    def _options(self) -> Iterable[str]:
        roles = ("VllmWorker", "PrefillWorker") if self._is_disaggregated else ("VllmWorker",)
        sections: dict[str, dict[str, Any]] = {role: dict(self._engine) for role in roles}
        if self._is_disaggregated:
            sections["VllmWorker"]["max-prefill-queue-size"] = 1_000_000  # as the simulation has it
        sections["Frontend"] = {"prefill-wait": self._wait_s}
        sections["Common"] = {name: ENGINE[name] for name in ("block-size", "max-model-len")}
        profile = {"profile-results-dir": self._engine["profile"]}
        sections["Planner"] = {**profile, **self._planner, "log-dir": self._directory / "planner"}
        return (f"--{name}.{key}={value}" for name, each in sections.items() for key, value in each.items())

    def simulated(self, trace: Sequence[TracedRequest], startup_s: float = 0.0) -> Result:
        """The trace under the planner's policy, the load policy where it names none."""
        path = self._directory / "trace.jsonl"
        path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in trace))
        options = SimulateOptions(
            trace=str(path),
            policies=(str(self._planner.get("policy", "load")),),
            slo=Slo(*(self._planner.get(name, 1000.0) for name in ("ttft", "itl"))),
            gpus=GPUS,
            is_disaggregated=self._is_disaggregated,
            startup_time_s=startup_s,
            engine=self._engine,
            planner=self._planner,
            prefill_wait_s=self._wait_s,
        )
        [result] = run_simulations(options)
        return result

    async def live(self, deployment: Deployment, trace: Sequence[TracedRequest]) -> Live:
        """The same, served. The trace begins when an interval of the planner does, as in the simulation."""
        path_ms = await self._path_ms(deployment)
        first = set(deployment.workers())
        begin_s = await self._next_decision_s() + float(self._planner["adjustment-interval"])
        watching = asyncio.create_task(_ready_s(deployment, first))
        seen = await replay(deployment.url, MODEL, trace, begin_s)
        watching.cancel()
        events = [each for each in self._events(begin_s) if 0 < each[0] < trace[-1].arrival_s]
        ready_s = await watching
        startup_s = sum(ready_s) / len(ready_s) - begin_s - events[0][0] if ready_s and events else 0.0
        return Live(seen, events, startup_s, path_ms)

    async def _path_ms(self, deployment: Deployment) -> float:
        seen = await replay(deployment.url, MODEL, ALONE, asyncio.get_running_loop().time())
        alone_ms = self.simulated(ALONE).outcome.ttft_ms
        simulated_ms = alone_ms.total / alone_ms.count
        return percentile((1000 * each.ttft_s for each in seen), 50) - simulated_ms

    async def _next_decision_s(self) -> float:
        count = len(self._decisions())
        await eventually(lambda: len(self._decisions()) > count, interval_s=0.01)
        return float(self._decisions()[-1]["observation"]["at_s"])

    def _decisions(self) -> list[Any]:
        paths = (self._directory / "planner").glob("**/decisions.jsonl")
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def _events(self, begin_s: float) -> Iterable[Event]:
        for record in self._decisions():
            if record["decision"]["desired"] != record["decision"]["current"]:
                yield record["observation"]["at_s"] - begin_s, record["decision"]["desired"]


async def _ready_s(deployment: Deployment, first: set[str]) -> list[float]:
    """When each worker beside the first ones became ready, watched until cancelled."""
    ready_s: dict[str, float] = {}
    try:
        while True:
            for name, worker in deployment.workers().items():
                if name not in first and worker["state"] == "ready":
                    ready_s.setdefault(name, worker["since_s"])
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return list(ready_s.values())
