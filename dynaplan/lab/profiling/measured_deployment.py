"""A deployment that is started to be measured, and what its engine states of itself.

It is ``dynaplan serve`` as a child, with directories of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from dynaplan.config import certificates
from dynaplan.engines.registry import engine_kind
from dynaplan.fleet.deployments import tail
from dynaplan.fleet.rules.statefile import Document, arbiter_of, fleet_of
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.http.client import get
from dynaplan.planner.metrics.worker_loads import HttpWorkerLoads
from dynaplan.util.errors import PermanentError, StatefileCorrupt, TemporaryError, UserError
from dynaplan.util.prometheus_text import read_samples

ENGINE_POLL_S = 0.05
"""Seconds between two reads of the deployment's state."""

DRAIN_S = 5.0
"""Seconds that the deployment's workers may take to drain."""

STOP_S = 60.0
"""Seconds that a deployment may take to end after SIGTERM, and again after a second one, before SIGKILL."""

EXIT_INPUT = 2
"""The exit code of ``dynaplan serve`` for wrong input."""

LAST_LINES = 12
"""The number of lines of a log that an error shows."""

WITHHELD_VARIABLES = frozenset(
    {
        *("DYN_DEPLOYMENT_CONFIG", "DYN_NAMESPACE", "DYNAMO_HOST", "DYNAMO_PORT", "DYNAMO_SERVICE_NAME"),
        *("DYNAMO_SERVICE_CONFIG", "DYNAPLAN_API_KEY", "DYN_CIRCUS_ENDPOINT_PORT", "DYN_CIRCUS_PUBSUB_PORT"),
        *("DYNAPLAN_TLS_CERT", "DYNAPLAN_TLS_KEY", "DYNAPLAN_ADVERTISE_HOST"),
    }
)
"""Environment variables that configure the user's own deployment; this one is configured by options."""

CHILD = (
    "import sys; from dynaplan.process.kernel import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); from dynaplan.cli import main; main()"
)
"""The child's program: our command line, killed when this process ends; its first argument is our pid."""

METRICS_TIMEOUT_S = 10.0
"""Seconds that the Frontend may take to answer."""

FACTS_POLL_S = 0.2
"""Seconds between two reads of the worker's metrics."""

KV_SIZE_WAIT_S = 10.0
"""Seconds to wait for the size of the KV cache: some engines state it only after their first requests."""

CONTEXT_METRIC, BLOCK_METRIC = "model_context_length", "model_kv_cache_block_size"
"""The ends of the names of the Frontend's gauges of a model."""


class EngineDidNotStart(PermanentError):
    """The deployment ended, or its engine failed, before it was ready."""


class DeploymentRefused(UserError):
    """``dynaplan serve`` ended with the code for wrong input: another try cannot help."""


@dataclass(frozen=True)
class MeasurementPlan:
    """A deployment to start: a graph with a configuration file, on a number of GPUs (None: all)."""

    graph: str
    config_path: Path
    directory: Path
    gpus: int | None
    start_timeout_s: float

    @property
    def namespace(self) -> str:
        """A namespace for each directory, so that no two profilers are in each other's way."""
        return f"profile-{sha256(os.fsencode(self.directory.absolute())).hexdigest()[:10]}"

    @property
    def state_dir(self) -> Path:
        """The directory of statefiles that this deployment has for itself."""
        return self.directory / "state"

    @property
    def log_path(self) -> Path:
        return self.directory / "serve.log"


class MeasuredDeployment:
    """One ``dynaplan serve``, run while the context lasts; nothing of it is left afterwards.

    Entering raises DeploymentRefused for a configuration that ``serve`` does not accept, EngineDidNotStart
    for an engine that does not come up, both with the last lines of its logs.
    """

    def __init__(self, plan: MeasurementPlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.worker_url = ""

    async def __aenter__(self) -> MeasuredDeployment:
        self._start()
        try:
            await self._wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _start(self) -> None:
        plan = self._plan
        options = ("--port", "0", "--host", "127.0.0.1", "--namespace", plan.namespace)
        gpus = () if plan.gpus is None else ("--gpus", str(plan.gpus))
        command = [
            *(sys.executable, "-P", "-c", CHILD, str(os.getpid())),
            *("serve", plan.graph, "-f", str(plan.config_path.absolute())),
            *(*options, *gpus, "--drain-timeout", str(DRAIN_S), "--leave-timeout", str(DRAIN_S)),
        ]
        with plan.log_path.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(plan, os.environ),
                start_new_session=True,  # Ctrl-C is for the profiler, which ends it in order
            )

    async def _wait_ready(self) -> None:
        deadline_s = monotonic() + self._plan.start_timeout_s
        while not self._is_ready():
            self._check_runs()
            if monotonic() > deadline_s:
                raise EngineDidNotStart(
                    f"not ready within {self._plan.start_timeout_s:g} s", hint=self._last_lines()
                )
            await asyncio.sleep(ENGINE_POLL_S)

    def _is_ready(self) -> bool:
        """Tell whether worker and Frontend have registered; raises EngineDidNotStart when one never will."""
        document = self._document()
        if document is None or "addresses" not in document:
            return False
        workers = [worker for worker in fleet_of(document) if worker.role in (Role.DECODE, Role.FRONTEND)]
        for worker in workers:
            if worker.state in (WorkerState.FAILED, WorkerState.BACKOFF):
                raise EngineDidNotStart(f"{worker.component}: {worker.reason}", hint=self._last_lines(worker))
        if not workers or any(worker.state is not WorkerState.READY for worker in workers):
            return False
        self.url = str(document["addresses"]["frontend_url"])
        self.worker_url = next((worker.url for worker in workers if worker.role is Role.DECODE), "")
        return bool(self.worker_url)

    def _document(self) -> Document | None:
        """Read the statefile.

        None when it is missing, damaged, or another process's: a killed one leaves its own.
        """
        path = self._plan.state_dir / f"{self._plan.namespace}.json"
        try:
            document = StatefileStore(path).read()
        except StatefileCorrupt:
            return None
        arbiter = arbiter_of(document) if document else None
        is_ours = arbiter is not None and self._process is not None and arbiter.pid == self._process.pid
        return document if is_ours else None

    def _check_runs(self) -> None:
        code = self._process.poll() if self._process else None
        if code is None:
            return
        if code == EXIT_INPUT:
            raise DeploymentRefused(_refusal(self._plan.log_path))
        raise EngineDidNotStart(f"dynaplan serve ended with exit code {code}", hint=self._last_lines())

    def _last_lines(self, worker: Worker | None = None) -> str:
        """The end of the log of ``serve``, or of the worker that failed."""
        path = self._plan.log_path
        if worker is not None:
            path = self._plan.directory / "logs" / self._plan.namespace / f"{worker.name}.log"
        return "\n  ".join([f"the end of {path}:", *tail(path, LAST_LINES)])

    async def stop(self) -> None:
        """End it by SIGTERM, a second one, then SIGKILL; return when it ended. A second call does nothing.

        When this is cancelled meanwhile, it goes on with the next of these.
        """
        process, self._process = self._process, None
        if process is None:
            return
        is_cancelled = False
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                try:
                    await _ended(process, STOP_S)
                except asyncio.CancelledError:
                    is_cancelled = True
        process.wait()
        if is_cancelled:
            raise asyncio.CancelledError


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline_s = monotonic() + timeout_s
    while process.poll() is None and monotonic() < deadline_s:
        await asyncio.sleep(ENGINE_POLL_S)


def _environment(plan: MeasurementPlan, environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in WITHHELD_VARIABLES}
    return kept | {
        "DYN_LOCAL_STATE_DIR": str(plan.state_dir.absolute()),
        "DYN_CIRCUS_LOG_DIR": str((plan.directory / "logs").absolute()),
    }


def _refusal(log_path: Path) -> str:
    """The error message of ``serve``: its last lines from ``Error:`` on."""
    lines: list[Any] = list(tail(log_path, LAST_LINES))
    first = next((number for number, line in enumerate(lines) if line.startswith("Error: ")), 0)
    return "\n".join(lines[first:]).removeprefix("Error: ") or "dynaplan serve refused its configuration"


@dataclass(frozen=True)
class EngineFacts:
    """``model`` is the name that clients use; ``context_tokens`` and ``request_slots`` are 0 if unknown."""

    model: str
    context_tokens: int
    max_kv_tokens: int
    request_slots: int

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> EngineFacts:
        """Read what ``asdict`` returns; raises KeyError or ValueError when it is something else."""
        return cls(
            str(document["model"]),
            *(int(document[key]) for key in ("context_tokens", "max_kv_tokens", "request_slots")),
        )


async def engine_facts(
    model: str, deployment: MeasuredDeployment, engine: str, max_kv_tokens: int | None = None
) -> EngineFacts:
    """Ask the Frontend and the worker; ``max_kv_tokens`` is for an engine that does not state it.

    Ask after the first requests. Raises TemporaryError when the Frontend does not answer, PermanentError when
    the size of the KV cache stays unknown.
    """
    gauges = await _model_gauges(deployment.url, model)
    block_tokens = 1 if engine_kind(engine).counts_kv_in_tokens else gauges.get(BLOCK_METRIC, 0)
    metrics = HttpWorkerLoads(tls=certificates.authorities(os.environ))
    deadline_s = monotonic() + KV_SIZE_WAIT_S
    try:
        while True:
            (load,) = await metrics.loads((deployment.worker_url,))
            slots = load.request_slots if load else 0
            known = max_kv_tokens or (load.kv_total_blocks * block_tokens if load else 0)
            if known:
                return EngineFacts(model, gauges.get(CONTEXT_METRIC, 0), known, slots)
            if monotonic() > deadline_s:
                raise PermanentError(
                    f"{engine} does not say how many tokens its KV cache holds",
                    hint="Add --max-kv-tokens N; engines print it when they start.",
                )
            await asyncio.sleep(FACTS_POLL_S)
    finally:
        await metrics.close()


async def _model_gauges(url: str, model: str) -> dict[str, int]:
    """Read the Frontend's gauges of the model, by the end of their names."""
    try:
        text = (await get(f"{url}/metrics", timeout_s=METRICS_TIMEOUT_S)).text
    except OSError as error:
        raise TemporaryError(f"{url}/metrics does not answer: {error or 'no answer in time'}") from error
    return {
        metric: int(value)
        for name, labels, value in read_samples(
            text, lambda name: name.endswith((CONTEXT_METRIC, BLOCK_METRIC))
        )
        for metric in (CONTEXT_METRIC, BLOCK_METRIC)
        if name.endswith(metric) and labels.get("model") == model
    }
