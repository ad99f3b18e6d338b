"""The whole service in virtual time: arrivals, routing, prefill queue, hand-offs, workers that come and go.

This is a discrete-event simulation. Events are arrivals, ends of prefill steps, hand-offs and workers that
become ready, in order of time. Decode engines have no events of their own: one is advanced to the present
when its state is asked for (by the router, a metric pull, the end of a drain), because between such questions
nothing changes it. So thousands of decode steps cost one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.contract.counts import PoolSizes, Sample
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming, hand_off_s
from dynaplan.engines.worker_load import kv_pressure
from dynaplan.events.dispatch_order import DispatchRule, UsualTime, deadline_s
from dynaplan.graph.lifecycle import Role
from dynaplan.routing.booking import BookEntry
from dynaplan.routing.disaggregation import PrefillPlace, place_prefill
from dynaplan.routing.hold_back import free_places, must_wait
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.pools import CacheChanges, Pools, SimulatedEngine, SimulatedWorker
from dynaplan.simulation.prefill_queue import QueuedPrompt, SimulatedPrefillQueue
from dynaplan.simulation.router import SimulatedRouter, SimulatedRouting
from dynaplan.simulation.tally import OutcomeTally, Tally

REMOTE = PrefillPlace.REMOTE  # to look it up in the enum takes 0.1 µs

REFILL_S = 0.002
"""Seconds from the end of a prompt's prefill until the next prompt takes its place: a live worker publishes
the answer, acknowledges the work and asks for more, two round trips to NATS of about 1 ms. Its next step has
begun by then, without that prompt."""

NEVER_S = 1e6
"""Seconds in which every request that a decode engine has ends: eleven days."""

LOOK_FOR_PLACE_S = 0.01
"""Seconds between two looks for the place of a request that is held back: decode engines tell of no end."""

UNLIMITED_QUEUE = 1_000_000
"""A length of a queue, in requests, that no simulation reaches: the queue has no limit."""


@dataclass(frozen=True)
class ServiceSettings:
    """The simulated deployment. Without a prefill role in ``engines`` it is aggregated.

    ``startup_s`` is the time, in seconds, from a worker's start until it gets requests, by role. The
    frontends refuse requests while ``max_waiting_requests`` wait for their first token. A prompt that is not
    computed ``prefill_wait_s`` after it was queued is computed by its decode worker; None: all wait.
    """

    engines: Mapping[Role, tuple[EngineSettings, StepTiming]]
    gpus: int
    gpus_per_worker: Mapping[Role, int]
    startup_s: Mapping[Role, float]
    routing: SimulatedRouting = field(default_factory=SimulatedRouting)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    concurrent_prefills: int = WorkerSettings.max_concurrent_prefills
    max_waiting_requests: int | None = None
    prefill_wait_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    seed: int = 0


_Event = tuple[float, int, Callable[[Any], None], Any]
"""The moment, in seconds; a number that keeps the order of equal moments; what happens, and to whom."""


class _Request(QueuedPrompt):
    """One request on its way. ``begun_s``: an engine had the prompt; ``first_s``: the first token was
    emitted. ``computed`` is the request of the engine that computes the prompt, ``directed`` what
    ``SimulatedRouter.direct`` has said of it."""

    __slots__ = ("begun_s", "computed", "decode", "directed", "entry", "first_s", "handed_over_s", "traced")

    def __init__(self, key: str, traced: TracedRequest) -> None:
        super().__init__(key, traced.arrival_s)
        self.traced = traced
        self.decode: SimulatedWorker | None = None
        self.entry: BookEntry | None = None
        self.computed: EngineRequest | None = None
        self.directed: tuple[SimulatedWorker, int] | None = None
        self.first_s = self.begun_s = self.handed_over_s = -1.0


class SimulatedService:
    """One deployment. The caller feeds arrivals and the time, which only goes forward.

    What becomes of requests counts in ``outcome``, or else in a ``tally`` of one's own.
    """

    def __init__(self, settings: ServiceSettings, first: PoolSizes, tally: Tally | None = None) -> None:
        self.settings = settings
        self.outcome = Outcome(settings.slo)
        self._tally: Tally = tally or OutcomeTally(self.outcome)
        self._meter: TrafficMeter | None = None
        self._decode_settings, _ = settings.engines[Role.DECODE]
        self.now_s = 0.0
        self._events: list[_Event] = []
        self._sequence = 0
        self._requests: dict[str, _Request] = {}
        self._count = 0
        self._waiting = 0
        self._without_worker: deque[_Request] = deque()
        self.running_limit: RunningLimit | None = None
        self._held_back: deque[_Request] = deque()
        self._is_looking = False
        self._first_disaggregation = settings.disaggregation
        rule = DispatchRule.of(settings.disaggregation)
        self._prefills: SimulatedPrefillQueue[_Request] = SimulatedPrefillQueue(
            settings.concurrent_prefills, rule
        )
        self._rest = UsualTime()
        self._router = SimulatedRouter(settings.routing, settings.seed)
        self.pools = Pools(settings.gpus, settings.gpus_per_worker, self._new_engine, self._begin_start)
        self._is_first = True
        self.pools.scale(first, 0.0)
        self._is_first = False

    # -- time ------------------------------------------------------------------------------------

    def run_until(self, at_s: float) -> None:
        """Let every event until that moment happen."""
        events = self._events
        while events and events[0][0] <= at_s:
            self.now_s, _, happen, subject = heappop(events)
            happen(subject)
        self.now_s = at_s

    def run_out(self) -> float:
        """Answer every request in the service; those that nobody can answer are lost.

        Returns the moment, in seconds, at which the last one ended.
        """
        while self._requests and (self._events or any(self.pools.decoders)):
            before = len(self._requests)
            if self._events:
                self.run_until(self._events[0][0])
            else:
                self.advance_decoders(self.now_s + NEVER_S)
                if len(self._requests) == before and not self._events:
                    break
        for request in self._requests.values():
            self._tally.lost(request.traced)
        return max(
            [self.now_s, *(worker.engine.now_s for worker in self.pools.all() if not worker.book.in_flight)]
        )

    def advance_decoders(self, at_s: float) -> None:
        """Bring every decode engine up to that moment."""
        for worker in self.pools.all(Role.DECODE):
            worker.engine.advance(at_s)
        self.pools.end_drained(at_s)

    def shared_by_copies(self) -> dict[int, Any]:
        """Return what deep copies need not copy, because it never changes, as the memo of ``deepcopy``."""
        traced = [request.traced for request in self._requests.values()]
        engines = [part for engine in self.settings.engines.values() for part in engine]
        parts = [self.settings, *engines, *traced, *(each.block_hashes for each in traced)]
        return {id(part): part for part in parts}

    def start_meter(self) -> TrafficMeter:
        """Return the traffic metrics of the frontends, which count from the first call on."""
        if self._meter is None:
            self._meter = TrafficMeter(self.settings.slo.ttft_ms, self.settings.slo.itl_ms)
        return self._meter

    @property
    def in_service(self) -> int:
        """The number of requests that have arrived and are not answered."""
        return len(self._requests)

    # -- what the planner sees -------------------------------------------------------------------

    def scale(self, targets: PoolSizes) -> None:
        """Ask for these numbers of workers from now on."""
        self.pools.scale(targets, self.now_s)

    def limit_local_prefill(self, most_tokens: int | None, most_running: int | None) -> None:
        """Have decode workers compute the prompts that these limits allow.

        None restores the settings' limit.
        """
        first = self._first_disaggregation
        after = replace(
            first,
            max_local_prefill_length_tokens=_or(most_tokens, first.max_local_prefill_length_tokens),
            max_local_running=_or(most_running, first.max_local_running),
        )
        self.settings = replace(self.settings, disaggregation=after)

    def sample(self) -> Sample:
        """Make one metric pull, as the live planner's observer does."""
        self.advance_decoders(self.now_s)
        prefill, decode = self.pools.prefillers, self.pools.decoders
        loads = [worker.engine.model.load() for worker in decode]
        return Sample(
            at_s=self.now_s,
            kv_usage=sum(map(kv_pressure, loads)) / len(loads) if loads else None,
            kv_missing="" if loads else "no decode worker is registered",
            prefill_queue=float(self.queue_depth) if prefill else None,
            queue_missing="" if prefill else "no prefill worker is registered",
            waiting_requests=sum(load.waiting_requests for load in loads),
            prefill_workers=len(prefill),
            decode_workers=len(decode),
        )

    @property
    def queue_depth(self) -> int:
        """The number of prompts in the prefill queue: waiting, or taken and not acknowledged."""
        return self._prefills.depth

    @property
    def decoding(self) -> int:
        """The number of requests at decode workers, those whose prompt is still being computed included."""
        return sum(worker.book.in_flight for worker in self.pools.all(Role.DECODE)) + len(
            self._without_worker
        )

    # -- requests --------------------------------------------------------------------------------

    def arrive(self, traced: TracedRequest) -> None:
        """Let a request come in now; one that no engine could ever serve, or that is refused, is lost."""
        prompt, output = traced.prompt_tokens, traced.output_tokens
        self._count += 1
        if (
            prompt < 1
            or output < 1
            or prompt + output > self._decode_settings.context_tokens
            or self._is_full()
        ):
            self._tally.lost(traced)
            return
        self._waiting += 1
        if self._meter:
            self._meter.arrived()
        key = str(self._count)
        if traced.block_hashes:
            traced = traced.with_blocks_of(self._decode_settings.block_tokens)
        self._requests[key] = request = _Request(key, traced)
        self._route(request)

    def _is_full(self) -> bool:
        """Tell whether as many requests wait for their first token as may."""
        most = self.settings.max_waiting_requests
        if most is None or self._waiting < most:
            return False
        self.advance_decoders(self.now_s)
        return self._waiting >= most

    def _route(self, request: _Request, *, may_wait: bool = True) -> None:
        if not self.pools.decoders:
            self._without_worker.append(request)
            return
        limit = self.running_limit
        if limit and may_wait and self._hold_back(request, limit):
            return
        hit_rate = self._book(request)
        place = place_prefill(
            self.settings.disaggregation,
            request.traced.prompt_tokens,
            hit_rate,
            self._prefills.depth,
            len(self.pools.prefillers),
            running=request.decode.book.in_flight if request.decode else 0,
        )
        if place is REMOTE:
            self.outcome.remote_prefills += 1
            self._queue_prefill(request)
            self._hand_out()
        else:
            self._submit(request, is_remote=False)

    def _hold_back(self, request: _Request, limit: RunningLimit) -> bool:
        """Have the request wait for a place, as at a live frontend; False where it need not, or in vain."""
        self.advance_decoders(self.now_s)
        if not must_wait(limit, self._running(), len(self._held_back)):
            return False
        self._held_back.append(request)
        if not self._is_looking:
            self._look_later(request)
        self._schedule(self.now_s + limit.wait_s, self._end_wait, request)
        return True

    def _running(self) -> list[int]:
        return [worker.book.in_flight for worker in self.pools.decoders]

    def _look_later(self, request: _Request) -> None:
        self._is_looking = True
        self._schedule(self.now_s + LOOK_FOR_PLACE_S, self._look_for_places, request)

    def _look_for_places(self, _: _Request) -> None:
        """Send the requests that have a place by now; look again while others wait."""
        self._is_looking = False
        self.advance_decoders(self.now_s)
        limit = self.running_limit
        while self._held_back and (limit is None or free_places(limit, self._running())):
            self._end_wait(self._held_back[0])
        if self._held_back:
            self._look_later(self._held_back[0])

    def _end_wait(self, request: _Request) -> None:
        if request in self._held_back:
            self._held_back.remove(request)
            self._route(request, may_wait=False)

    def _book(self, request: _Request) -> float:
        """Book the request at the router's choice; return the part of its prompt that is cached there."""
        if self._router.needs_present:
            self.advance_decoders(self.now_s)
        workers: Sequence[SimulatedWorker] = self.pools.decoders
        if limit := self.running_limit:
            workers = [each for each in workers if each.book.in_flight < limit.most] or workers
        request.decode, request.entry = self._router.book(request.traced.block_hashes, workers, self.now_s)
        return request.entry.prefix_hit_rate

    def _submit(self, request: _Request, *, is_remote: bool) -> None:
        """Give the request to its decode worker's engine."""
        assert request.decode is not None
        traced = request.traced
        request.decode.engine.advance(self.now_s)
        request.begun_s = request.begun_s if is_remote else self.now_s
        prompt, output = traced.prompt_tokens, traced.output_tokens
        asked = EngineRequest(request.key, prompt, output, traced.block_hashes, is_remote=is_remote)
        request.computed = request.computed or asked
        request.decode.engine.submit(asked, self.now_s)

    def _first_token_at(self, key: str, at_s: float) -> None:
        request = self._requests[key]
        if request.first_s < 0:
            request.first_s = at_s
            self._waiting -= 1
            if request.handed_over_s >= 0:
                self._rest = self._rest.after(at_s - request.handed_over_s)
            assert request.entry is not None
            request.entry.finish_prefill()
            if self._meter:
                self._meter.first_token(at_s - request.arrival_s)

    def _finished_at(self, key: str, at_s: float) -> None:
        request = self._requests.pop(key)
        assert request.entry and request.decode and request.computed
        request.entry.close()
        traced, first_s, cached_tokens = request.traced, request.first_s, request.computed.cached_tokens
        if self._meter:
            self._meter.finished(traced, at_s - first_s, at_s - traced.arrival_s, cached_tokens)
        self._tally.answered(traced, request.decode.number, request.begun_s, first_s, at_s, cached_tokens)

    # -- remote prefill --------------------------------------------------------------------------

    def _queue_prefill(self, request: _Request) -> None:
        if request.traced.block_hashes:
            workers = self.pools.prefillers
            block_tokens = workers[0].engine.model.settings.block_tokens
            hashes = request.traced.with_blocks_of(block_tokens).block_hashes
            request.directed = self._router.direct(hashes, workers, self.now_s)
        target_ms = self.settings.disaggregation.prefill_deadline_ms or 0.0
        request.deadline_s = deadline_s(request.arrival_s, target_ms, self._rest)
        if request.directed:
            self._prefills.direct(request, request.directed[0])
        else:
            self._prefills.put(request)
        if (wait_s := self.settings.prefill_wait_s) is not None:
            self._schedule(self.now_s + wait_s, self._give_up, request)

    def _give_up(self, request: _Request) -> None:
        """Have the decode worker compute the prompt, unless a prefill worker has by now."""
        if request.handed_over_s >= 0:
            return
        self._prefills.give_up(request)
        if request.directed:
            self._router.directed(*request.directed)
        request.computed = request.directed = None
        self.outcome.given_up_prefills += 1
        self._take_over(request, is_remote=False)

    def _hand_out(self) -> None:
        """Give prefill workers the prompts that they ask for; an idle one begins with its first."""
        while assigned := self._prefills.assign(self.now_s):
            worker, request = assigned
            request.begun_s = self.now_s
            traced = request.traced
            if traced.block_hashes:
                traced = traced.with_blocks_of(worker.engine.model.settings.block_tokens)
            asked = EngineRequest(request.key, traced.prompt_tokens, 1, traced.block_hashes)
            request.computed = asked
            worker.engine.submit(asked, self.now_s)
            self._step_prefill(worker)

    def _step_prefill(self, worker: SimulatedWorker) -> None:
        """Begin the worker's next step, if it has prompts; its end is the next event.

        The step computes the prompts that the worker holds at this moment: later ones wait for the next step.
        """
        if not worker.is_computing and worker.engine.step():
            worker.is_computing = True
            self._schedule(worker.engine.now_s, self._end_prefill_step, worker)

    def _end_prefill_step(self, worker: SimulatedWorker) -> None:
        """Hand over what the step has computed, and begin the next one."""
        worker.is_computing = False
        for asked in worker.engine.model.finished:
            request = self._prefills.computed(asked.request_id, self.now_s)
            self._schedule(self.now_s + REFILL_S, self._acknowledge, request)
            if not request.is_given_up:
                self._hand_over(request)
        self._step_prefill(worker)

    def _hand_over(self, request: _Request) -> None:
        request.handed_over_s = self.now_s
        if request.directed:
            self._router.directed(*request.directed)
        self._schedule(self.now_s + hand_off_s(request.traced.prompt_tokens), self._take_over, request)

    def _acknowledge(self, request: _Request) -> None:
        worker = self._prefills.acknowledge(request)
        self._hand_out()
        if not (worker.book.in_flight or worker.is_ready):
            self.pools.end_drained(self.now_s)

    def _take_over(self, request: _Request, *, is_remote: bool = True) -> None:
        """Give the request to its decode worker, or to another one when that is leaving.

        ``is_remote``: its KV entries come from a prefill worker; else its prompt is computed there.
        """
        assert request.decode and request.entry
        if not request.decode.is_ready and self.pools.decoders:
            request.entry.close()
            self._book(request)
        self._submit(request, is_remote=is_remote)

    # -- workers ---------------------------------------------------------------------------------

    def _new_engine(self, role: Role) -> SimulatedEngine:
        changes = CacheChanges() if self.settings.routing.uses_events else None
        model = EngineModel(*self.settings.engines[role], changes)
        if role is Role.PREFILL:
            return SimulatedEngine(model, _do_nothing, _do_nothing, changes)
        return SimulatedEngine(model, self._first_token_at, self._finished_at, changes)

    def _begin_start(self, worker: SimulatedWorker) -> None:
        if self._is_first:
            self._serve(worker)
        else:
            startup_s = self.settings.startup_s[worker.record.role]
            self._schedule(self.now_s + startup_s, self._become_ready, worker)

    def _serve(self, worker: SimulatedWorker) -> None:
        self.pools.ready(worker, self.now_s)
        if worker.is_ready and worker.record.role is Role.PREFILL:
            self._prefills.ask(worker)

    def _become_ready(self, worker: SimulatedWorker) -> None:
        self._serve(worker)
        while self._without_worker and self.pools.decoders:
            self._route(self._without_worker.popleft())
        self._hand_out()

    def _schedule(
        self, at_s: float, happen: Callable[[Any], None], subject: _Request | SimulatedWorker
    ) -> None:
        self._sequence += 1
        heappush(self._events, (at_s, self._sequence, happen, subject))


def _do_nothing(*_: object) -> None:
    """Stand for tokens of a prefill worker, which the client does not see."""


def _or(number: int | None, otherwise: int | None) -> int | None:
    return otherwise if number is None else number
