"""One measurement from its first request to its last answer, or Ctrl-C: the load, its counts, the fleet."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from dynaplan.cli.timing import LINE_POLL_S
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.fleet import deployments
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role
from dynaplan.http.tls import ClientTls
from dynaplan.lab.profiling.load.completions import (
    Answer,
    AnswerStream,
    CompletionClient,
    RequestFailed,
    open_client,
    served_model,
)
from dynaplan.lab.profiling.load.generator import LoadGenerator
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.planner.model import DecisionRecord
from dynaplan.planner.recorders.decision_log import recent_records
from dynaplan.process.signals import on_signals
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import ChangeCount
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.durations import clock
from dynaplan.util.errors import DeploymentError, UserError
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

RATE_WINDOW_S = 5.0
"""Seconds over which the rates of the live line are taken."""

MAX_RECORDS = 10_000
"""The planner's last records that are searched for changes."""


@dataclass(frozen=True)
class OfferedLoad:
    """The load of a measurement: ``clients`` that send ``request`` again and again, or with 0 a ``trace``.

    Nothing new is sent after ``duration_s``.
    """

    clients: int
    request: TracedRequest
    trace: Callable[[], Iterator[TracedRequest]]
    duration_s: float

    def requests(self, duration_s: float) -> Iterator[TracedRequest]:
        """Return the trace's requests that are due within its first ``duration_s`` seconds."""
        return takewhile(lambda request: request.arrival_s < duration_s, self.trace())

    async def send(self, generator: LoadGenerator, began_s: float) -> None:
        if self.clients:
            await generator.closed_loop(self.clients, self.request)
        else:
            await generator.open_loop(self.requests(self.duration_s), began_s)


@dataclass(frozen=True)
class BenchTarget:
    """The service to measure: its base address, the API key, the TLS settings, and the model to ask for.

    Without a model it is the first that is served. ``is_text``: prompts are texts, not token ids.
    """

    url: str
    api_key: str
    tls: ClientTls
    model: str = ""
    is_text: bool = False


class RequestCounters:
    """Counts answers and failures of one measurement that began at ``began_s`` (``time.perf_counter``)."""

    def __init__(self, slo: Slo, began_s: float) -> None:
        self.outcome = Outcome(slo)
        self.began_s = began_s
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.open: set[AnswerStream] = set()
        self.requests_sent = 0
        self.max_late_s = 0.0
        self.prompts_of_other_length = self.answers_of_other_length = 0
        self._ended_tokens = 0
        self._recent: deque[tuple[float, int, int]] = deque()

    def sent(self, stream: AnswerStream, due_s: float) -> None:
        """Count a request that was sent now, and how late that is after ``due_s``."""
        self.requests_sent += 1
        self.open.add(stream)
        self.max_late_s = max(self.max_late_s, time.perf_counter() - due_s)

    def answered(self, stream: AnswerStream, due_s: float, answer: Answer, request: TracedRequest) -> None:
        """Count an answer to a request that was due at that time.

        Latencies count from when the request was due, not from when it was sent: what a slow service delays
        is part of what its users wait.
        """
        self._end(stream)
        outcome = self.outcome
        ttft_s, duration_s = answer.first_s - due_s, answer.last_s - due_s
        outcome.add(due_s - self.began_s, ttft_s, answer.itl_s, duration_s, answer.output_tokens)
        if answer.prompt_tokens:
            outcome.note_hits(answer.prompt_tokens, min(answer.cached_tokens, answer.prompt_tokens))
            self.prompts_of_other_length += answer.prompt_tokens != request.prompt_tokens
        self.answers_of_other_length += answer.output_tokens != request.output_tokens

    def failed(self, stream: AnswerStream, failure: RequestFailed) -> None:
        """Count a request without a whole answer."""
        self._end(stream)
        self.failures[failure.kind] += 1
        self.examples.setdefault(failure.kind, failure.message)
        self.outcome.lost += 1

    def _end(self, stream: AnswerStream) -> None:
        self.open.discard(stream)
        self._ended_tokens += stream.tokens

    def line(self, now_s: float, until_s: float | None) -> str:
        """Return the live line; ``until_s`` is the end of the sending, None while answers are waited for."""
        outcome, passed_s = self.outcome, now_s - self.began_s
        tokens = self._ended_tokens + sum(stream.tokens for stream in self.open)
        self._recent.append((now_s, outcome.requests, tokens))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()
        before_s, requests, counted = self._recent[0]
        span_s = max(now_s - before_s, 1e-9)
        parts = [
            clock(passed_s) + (f" of {clock(until_s - self.began_s)}" if until_s else ""),
            f"{len(self.open)} open" if until_s else f"waiting for {len(self.open)} answers",
            f"{(outcome.requests - requests) / span_s:.1f} requests/s",
            f"{(tokens - counted) / span_s:.0f} tokens/s",
            f"TTFT p50 {outcome.ttft_ms.percentile(50):.0f} p95 {outcome.ttft_ms.percentile(95):.0f} ms",
            f"ITL p50 {outcome.itl_ms.percentile(50):.1f} p95 {outcome.itl_ms.percentile(95):.1f} ms",
        ]
        if outcome.lost:
            parts.append(f"{outcome.lost} failed")
        return "  ".join(parts)

    def document(self) -> dict[str, Any]:
        """Return the counters that the JSON document has beyond the table's row."""
        return {
            "sent": self.requests_sent,
            "failures": dict(self.failures),
            "unfinished": len(self.open),
            "output_tokens": self.outcome.output_tokens,
            "late_s": round(self.max_late_s, 6),
        }


class FleetMonitor:
    """Adds up GPU-seconds from one ``sample`` to the next; made at the beginning of a measurement."""

    def __init__(self, found: RunningDeployment, now_s: float) -> None:
        self._found = found
        self._began = datetime.now().astimezone()
        self._sampled_s = now_s
        self._held = _held_gpus(found)
        self.gpu_s = 0.0
        self.is_disaggregated = any(worker.role is Role.PREFILL for worker in found.workers)

    def sample(self, now_s: float) -> None:
        """Add the GPUs held times the time since the last sample; a deployment that has ended holds none."""
        self.gpu_s += self._held * (now_s - self._sampled_s)
        self._sampled_s = now_s
        try:
            self._held = _held_gpus(deployments.find_deployment(self._found.namespace))
        except DeploymentError:
            self._held = 0.0

    def changes(self) -> ChangeCount:
        counted = ChangeCount()
        for document in recent_records(self._found.log_dir / "planner", MAX_RECORDS):
            try:
                record = DecisionRecord.from_json(document)
                at = datetime.fromisoformat(record.wall_time)
            except (KeyError, TypeError, ValueError, AttributeError, UserError):
                continue
            if at >= self._began and record.decision.is_change and not record.settings.no_operation:
                since_s = (at - self._began).total_seconds()
                counted.count(record.decision.current, record.decision.desired, since_s)
        return counted


def _held_gpus(found: RunningDeployment) -> float:
    scaled = [worker for worker in found.workers if worker.role in SCALED_ROLES]
    return float(sum(each.gpu_request for each in scaled if each.state in HOLDS_GPUS))


@dataclass(frozen=True)
class Measurement:
    """A measurement that is over. ``sending_s`` is the time in which new requests were sent, in seconds.

    ``client_load`` is the part of a core that this client took.
    """

    counters: RequestCounters
    model: str
    sending_s: float
    client_load: float
    is_interrupted: bool


async def measure(
    service: BenchTarget, load: OfferedLoad, slo: Slo, seed: int, fleet: FleetMonitor | None
) -> Measurement:
    """Send the load and return the result; SIGINT and SIGTERM end it with what there is.

    Raises DeploymentError when the service does not say which model it has.
    """
    raise_descriptor_limit()  # a trace bounds its open requests by nothing
    prompts = PromptPool(is_text=service.is_text, seed=seed)
    async with open_client(service.api_key, service.tls) as http:
        model = service.model or await served_model(http, service.url)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        counters = RequestCounters(slo, began_s)
        generator = LoadGenerator(CompletionClient(http, service.url, model), prompts, counters)
        work = asyncio.create_task(load.send(generator, began_s))
        is_whole = await _follow(work, generator, counters, load.duration_s, fleet)
        passed_s = time.perf_counter() - began_s
        used_s = time.process_time() - cpu_s
    return Measurement(
        counters,
        model,
        min(passed_s, load.duration_s),
        used_s / max(passed_s, 1e-9),
        is_interrupted=not is_whole,
    )


async def _follow(
    work: asyncio.Task[None],
    generator: LoadGenerator,
    counters: RequestCounters,
    duration_s: float,
    fleet: FleetMonitor | None,
) -> bool:
    """Show the live line until the work is done; return False when a signal has ended it."""
    until_s = counters.began_s + duration_s
    with on_signals(lambda _: _cancel(work)), ProgressLine() as line:
        while not work.done():
            now_s = time.perf_counter()
            is_sending = now_s < until_s
            await asyncio.wait(
                {work}, timeout=min(LINE_POLL_S, until_s - now_s) if is_sending else LINE_POLL_S
            )
            now_s = time.perf_counter()
            if now_s >= until_s:
                generator.stop()
            if fleet:
                fleet.sample(min(now_s, until_s))
            line.show(counters.line(now_s, until_s if now_s < until_s else None))
    if work.cancelled():
        return False
    work.result()
    return True


def _cancel(work: asyncio.Task[None]) -> None:
    work.cancel()
