"""``dynaplan.serve`` and ``dynaplan.simulate``: deployments and simulations from Python.

``with dynaplan.serve("graphs.agg:Frontend", model="x.gguf") as deployment`` is a thin layer over the
commands. Everything that a command does in an event loop of its own is done by the command, as a child: a
notebook has an event loop already.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dynaplan.cli.main import EXIT_INPUT
from dynaplan.cli.service_options import GRAPH_OF_A_MODEL, file_for, is_model, model_override
from dynaplan.planner.model import DecisionRecord
from dynaplan.planner.recorders.decision_log import recent_records
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, UserError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment


def serve(
    graph: str | Sequence[str],
    config_file: str | None = None,
    *,
    model: str | None = None,
    namespace: str = "dynamo",
    port: int = 0,
    gpus: int | None = None,
    options: Mapping[str, Any] | None = None,
    directory: Path | str | None = None,
) -> ServedDeployment:
    """Start ``dynaplan serve`` as a child, and return its deployment when it is ready.

    ``graph`` may also be a model, several models, or a file of them, which are loaded on request.
    ``options`` are options of the graph's services, ``{"VllmWorker.max-num-seqs": 8}``. With ``model`` alone
    the shipped YAML of its engine is used. ``port`` 0 lets the kernel choose. ``directory`` is where the
    graph and the file are looked up, by default the current one.

    It ends with its ``with`` block, or with ``stop``; with this process in any case. Raises UserError when
    the input is wrong, PermanentError with the last lines of its log when it does not start.
    """
    from dynaplan.cli.detach import LOG_FILE, start_detached
    from dynaplan.fleet.deployments import find_deployment
    from dynaplan.fleet.preparation import log_directory

    if isinstance(graph, str) and is_model(graph):
        graph, model = GRAPH_OF_A_MODEL, graph
    words = [*([graph] if isinstance(graph, str) else graph), "--namespace", namespace, "--port", str(port)]
    if file := config_file or (file_for(model) if model else None):
        words += ["-f", str(file)]
    words += ["--gpus", str(gpus)] if gpus is not None else []
    words += [model_override(model)] if model else []
    words += overrides_of(options or {})
    log = log_directory(namespace) / LOG_FILE
    start = partial(start_detached, words, Path(directory or Path.cwd()).absolute(), log, is_bound=True)
    is_main = threading.current_thread() is threading.main_thread()
    started = start() if is_main else _LASTING_THREAD.submit(start).result()
    if started.code is None:
        return ServedDeployment(find_deployment(namespace))
    lines = started.last_lines()
    if started.code == EXIT_INPUT:
        raise UserError("\n".join(lines).partition("Error: ")[2] or "dynaplan serve refused its input")
    raise PermanentError(
        f"dynaplan serve ended with exit code {started.code}",
        hint="\n  ".join([f"the end of {log}:", *lines]),
    )


_LASTING_THREAD = ThreadPoolExecutor(1)
"""Starts what a thread asks for that may end before this process; see ``kernel.signal_at_parents_end``."""


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Return the options of services as words of a command line; ConfigError for one without a service."""
    for name in options:
        if "." not in name.strip("."):
            raise ConfigError(
                f"options: {name!r}", hint="Expected 'Service.key', as 'VllmWorker.max-num-seqs'."
            )
    return [f"--{name}={json.dumps(value)}" for name, value in options.items()]


class ServedDeployment:
    """A deployment that runs, and ends with its ``with`` block."""

    def __init__(self, found: RunningDeployment) -> None:
        self.namespace = found.namespace
        self.url = found.frontend_url
        self.log_dir = found.log_dir
        self._began_s = found.began_s
        self._serve_pid = found.arbiter.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the deployment; requests may finish, unless the block ends with an error."""
        self.stop(now=error is not None)

    def __repr__(self) -> str:
        return f"<ServedDeployment {self.namespace} at {self.url}>"

    @property
    def client(self) -> Any:
        """An ``openai.OpenAI`` client of the deployment; ConfigError where that package is not installed."""
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ConfigError(
                "the package openai is not installed",
                hint="pip install openai, or use `url` with any client.",
            ) from error
        return OpenAI(base_url=f"{self.url}/v1", api_key=os.environ.get("DYNAPLAN_API_KEY") or "none")

    def status(self) -> dict[str, Any]:
        """Return the deployment's document of ``dynaplan status --json``."""
        return dict(json.loads(self._run("status", "--json")))

    def scale(self, *, hold: bool = False, wait: bool = True, **counts: int) -> str:
        """Set numbers of workers: ``scale(decode=2)``; return the command's output.

        With ``wait`` it returns when that is carried out; with ``hold`` the planner keeps the numbers.
        """
        words = [f"{role}={number}" for role, number in counts.items()]
        return self._run("scale", *words, "--wait" if wait else "--no-wait", *(["--hold"] if hold else []))

    def models(self) -> dict[str, Any]:
        """Return what ``dynaplan models --json`` has of the models that are loaded on request, by name."""
        return dict(json.loads(self._run("models", "--json"))["models"])

    def load(self, model: str, *, keep: str = "", wait: bool = True) -> str:
        """Load a model now, and keep it for a time ``keep`` such as ``2h``; return the command's output."""
        return self._run("load", model, *(["--for", keep] if keep else []), "--wait" if wait else "--no-wait")

    def unload(self, model: str, *, wait: bool = True) -> str:
        """Put a model away after the requests that it answers; return the command's output."""
        return self._run("unload", model, "--wait" if wait else "--no-wait")

    def why(self, last: int = 3) -> str:
        return self._run("why", "--last", str(last))

    def decisions(self, last: int = 100) -> list[DecisionRecord]:
        """Return the planner's last decisions as records, the oldest first."""
        documents = recent_records(self.log_dir / "planner", last, since_s=self._began_s)
        return [DecisionRecord.from_json(document) for document in documents]

    def stop(self, *, now: bool = False) -> None:
        """Stop the deployment, if it runs, and wait for its end; requests may finish, unless ``now``."""
        from dynaplan.fleet.deployments import find_deployment

        try:
            is_ours = find_deployment(self.namespace).arbiter.pid == self._serve_pid
        except DeploymentError:
            is_ours = False
        if is_ours:
            self._run("stop", *(["--now"] if now else []))
        self._reap()

    def _reap(self) -> None:
        """Wait until the child has ended, and take its exit code, so that no zombie is left."""
        try:
            os.waitpid(self._serve_pid, 0)
        except ChildProcessError:
            return

    def _run(self, *words: str) -> str:
        """Run a command for this deployment and return its output.

        A command that fails raises UserError for wrong input, else PermanentError, with what it wrote.
        """
        command = [sys.executable, "-P", "-m", "dynaplan", *words, "--namespace", self.namespace]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        message = done.stderr.strip().removeprefix("Error: ") or f"`dynaplan {words[0]}` failed"
        raise UserError(message) if done.returncode == EXIT_INPUT else PermanentError(message)


Result = TypeVar("Result")


def simulate(
    trace: str | Path,
    policies: Sequence[str] = (),
    *,
    config_file: str | None = None,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    gpus: int = 8,
    mode: str | None = None,
    startup_time: float | None = None,
    rate_scale: float = 1.0,
    ttft: float | None = None,
    itl: float | None = None,
    start: str | None = None,
    router: str | None = None,
    kv_events: bool | None = None,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Run policies on a trace in virtual time; return the rows of ``dynaplan simulate --json``.

    The parameters are the command's options; ``options`` are those of the graph's sections,
    ``{"Planner.adjustment-interval": 10}``. Raises ConfigError for wrong ones.
    """
    from dynaplan.cli.simulate import simulation_of
    from dynaplan.graph.config import find_config_file
    from dynaplan.graph.loading import shipped_graphs
    from dynaplan.lab.simulate.options import read_graph
    from dynaplan.lab.simulate.policy_runs import run_simulations
    from dynaplan.lab.simulate.table import rows

    file = find_config_file(config_file, Path.cwd(), beside=shipped_graphs()) if config_file else None
    graph = read_graph(file, overrides_of(options or {}))
    given = {
        "trace": str(trace),
        "profile": profile,
        "gpus": gpus,
        "mode": mode,
        "startup_time": startup_time,
        "rate_scale": rate_scale,
        "ttft": ttft,
        "itl": itl,
        "start": start,
        "router": router,
        "kv_events": kv_events,
        "seed": seed,
    }
    chosen = [policies] if isinstance(policies, str) else list(policies)
    asked = simulation_of(chosen or [str(graph.sections["Planner"].get("policy", "load"))], given, graph)
    return outside_loop(lambda: rows(list(run_simulations(asked))))


def outside_loop(work: Callable[[], Result]) -> Result:
    """Do the work where no event loop runs: it may run one of its own, which a notebook's does not allow."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
