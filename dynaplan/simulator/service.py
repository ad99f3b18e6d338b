"""The whole service in virtual time: arrivals, routing, prefill queue, hand-offs, workers that come and go.

Only what can change something is an event: arrivals, ends of prefill steps, hand-offs, workers that become
ready, and whatever the caller schedules. Decoding engines are advanced when somebody looks at them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from dynaplan.core.engine.draws import uniform_draws
from dynaplan.core.engine.hand_off import hand_off_s
from dynaplan.core.engine.model import EngineModel
from dynaplan.core.engine.request import EngineRequest
from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import StepTiming
from dynaplan.core.planning.load_policy import kv_pressure
from dynaplan.core.routing.choosing import MODES, Candidate, Inputs
from dynaplan.core.routing.disaggregation import PrefillPlace, place_prefill
from dynaplan.core.routing.prefix_index import PrefixIndex
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.observation import Sample
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.routing import DisaggregationSettings
from dynaplan.domain.settings.worker import WorkerSettings
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.meter import TrafficMeter
from dynaplan.simulator.outcome import Outcome, Slo
from dynaplan.simulator.pools import Pools, SimulatedWorker
from dynaplan.simulator.prefill_queue import PrefillQueue

REFILL_S = 0.002
"""How long after a prompt's prefill its place is taken by the next one: the live worker publishes the answer,
acknowledges the work and asks for more, two round trips to NATS. The next step has begun by then."""


@dataclass(frozen=True)
class ServiceSettings:
    """The simulated deployment. Without a prefill role in ``engines`` it is aggregated.

    ``startup_s`` is how long a worker takes from its start to its first request, by role. With
    ``max_waiting_requests`` that have not begun to answer, the frontends refuse more.
    """

    engines: Mapping[Role, tuple[EngineSettings, StepTiming]]
    gpus: int
    gpus_per_worker: Mapping[Role, int]
    startup_s: Mapping[Role, float]
    router: str = "round-robin"
    overlap_weight: float = 1.0
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    concurrent_prefills: int = WorkerSettings.max_concurrent_prefills
    max_waiting_requests: int | None = None
    slo: Slo = field(default_factory=Slo)
    seed: int = 0


@dataclass(slots=True)
class _Live:
    """One request on its way."""

    traced: TracedRequest
    decode: SimulatedWorker | None = None
    prefill: SimulatedWorker | None = None
    prompt_blocks: int = 0
    prefill_blocks: int = 0
    first_s: float = -1.0
    begun_s: float = -1.0


class SimulatedService:
    """One deployment. The caller feeds arrivals and time; both only go forward."""

    def __init__(self, settings: ServiceSettings, first: Targets) -> None:
        self.settings = settings
        self.outcome = Outcome(settings.slo)
        self.meter = TrafficMeter()
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._live: dict[str, _Live] = {}
        self._requests = 0
        self._waiting = 0
        self._homeless: deque[str] = deque()
        self._prefills = PrefillQueue(settings.concurrent_prefills)
        self._turn = 0
        self._draws = uniform_draws(settings.seed)
        self._index = PrefixIndex()
        told = {
            Role.PREFILL: (_ignore, self._prefilled_at),
            Role.DECODE: (self._first_token_at, self._finished_at),
        }
        self.pools = Pools(settings.gpus, settings.gpus_per_worker, self._new_model, told, self._starting)
        self._is_first = True
        self.pools.want(first, 0.0)
        self._is_first = False

    # -- time ------------------------------------------------------------------------------------

    def run_until(self, at_s: float) -> None:
        """Let everything happen that happens before that moment."""
        events = self._events
        while events and events[0][0] <= at_s:
            self.now_s, _, event = heappop(events)
            event()
        self.now_s = at_s

    def run_out(self) -> float:
        """Answer every request that is in the service; when the last one ended, in seconds."""
        while self._live and (self._events or any(self.pools.serving(Role.DECODE))):
            before = len(self._live)
            if self._events:
                self.run_until(self._events[0][0])
            else:
                self.advance_decoders(self.now_s + 1e6)
                if len(self._live) == before and not self._events:
                    break
        self.outcome.lost += len(self._live)
        return max([self.now_s, *(each.engine.now_s for each in self.pools.all() if not each.in_flight)])

    def advance_decoders(self, at_s: float) -> None:
        """Bring every decoding engine up to that moment."""
        for each in self.pools.all(Role.DECODE):
            each.engine.advance(at_s)
        self.pools.end_drained(at_s)

    @property
    def in_service(self) -> int:
        """The requests that have arrived and are not answered."""
        return len(self._live)

    # -- what the planner sees -------------------------------------------------------------------

    def want(self, targets: Targets) -> None:
        """So many workers from now on."""
        self.pools.want(targets, self.now_s)

    def sample(self) -> Sample:
        """One metric pull, as the live planner's observer makes it."""
        self.advance_decoders(self.now_s)
        prefill, decode = self.pools.serving(Role.PREFILL), self.pools.serving(Role.DECODE)
        loads = [each.engine.model.load() for each in decode]
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
        """The prefill queue: waiting, or taken and not acknowledged."""
        return self._prefills.depth

    @property
    def decoding(self) -> int:
        """The requests that the decode workers have, or will have once their prompt is computed."""
        return sum(each.in_flight for each in self.pools.all(Role.DECODE)) + len(self._homeless)

    # -- requests --------------------------------------------------------------------------------

    def arrive(self, traced: TracedRequest) -> None:
        """A request comes in, now; one that no engine could ever serve, or that is refused, is lost."""
        engine, _ = self.settings.engines[Role.DECODE]
        tokens = traced.prompt_tokens + traced.output_tokens
        is_servable = min(traced.prompt_tokens, traced.output_tokens) >= 1 and tokens <= engine.context_tokens
        if not is_servable or self._is_full():
            self.outcome.lost += 1
            return
        self._requests += 1
        self._waiting += 1
        self.meter.arrived()
        key = str(self._requests)
        self._live[key] = _Live(traced.with_blocks_of(engine.block_tokens))
        self._route(key)

    def _is_full(self) -> bool:
        """Whether as many requests as may wait have not begun to answer."""
        most = self.settings.max_waiting_requests
        if most is None or self._waiting < most:
            return False
        self.advance_decoders(self.now_s)
        return self._waiting >= most

    def _route(self, key: str) -> None:
        live = self._live[key]
        workers = self.pools.serving(Role.DECODE)
        if not workers:
            self._homeless.append(key)
            return
        hit_rate = self._book(live, workers)
        place = place_prefill(
            self.settings.disaggregation,
            live.traced.prompt_tokens,
            hit_rate,
            self.queue_depth,
            len(self.pools.serving(Role.PREFILL)),
        )
        if place is PrefillPlace.REMOTE:
            self.outcome.remote_prefills += 1
            self._prefills.put(key)
            self._hand_out()
        else:
            self._submit(key, live, is_remote=False)

    def _book(self, live: _Live, workers: Sequence[SimulatedWorker]) -> float:
        """Give the request to the router's choice; the part of its prompt expected in the cache there."""
        choose = MODES[self.settings.router]
        if self.settings.router != "round-robin":
            self.advance_decoders(self.now_s)
        hashes = live.traced.block_hashes if self.settings.router == "kv" else ()
        overlaps = self._index.overlaps(hashes, self.now_s) if hashes else {}
        candidates = [_candidate(each, overlaps.get(each.number, 0)) for each in workers]
        draw = next(self._draws) if self.settings.router == "random" else 0.0
        chosen = choose(candidates, Inputs(self._turn, draw, len(hashes), self.settings.overlap_weight))
        self._turn += 1
        if hashes:
            self._index.record(hashes, chosen.instance_id, self.now_s)
        live.decode = worker = next(each for each in workers if each.number == chosen.instance_id)
        live.prompt_blocks = len(hashes)
        live.prefill_blocks = len(hashes) - chosen.overlap_blocks
        worker.in_flight += 1
        worker.prompt_blocks += live.prompt_blocks
        worker.prefill_blocks += live.prefill_blocks
        return chosen.overlap_blocks / len(hashes) if hashes else 0.0

    def _submit(self, key: str, live: _Live, *, is_remote: bool) -> None:
        """The request goes to its decode worker's engine."""
        assert live.decode is not None
        traced = live.traced
        live.decode.engine.advance(self.now_s)
        live.begun_s = live.begun_s if is_remote else self.now_s
        request = EngineRequest(
            key, traced.prompt_tokens, traced.output_tokens, traced.block_hashes, is_remote=is_remote
        )
        live.decode.engine.submit(request, self.now_s)

    def _first_token_at(self, key: str, at_s: float) -> None:
        live = self._live[key]
        if live.first_s < 0:
            live.first_s = at_s
            self._waiting -= 1
            _prefilled_there(live)
            self.meter.first_token(at_s - live.traced.arrival_s)

    def _finished_at(self, key: str, at_s: float) -> None:
        live = self._live.pop(key)
        _unbook(live)
        traced, tokens = live.traced, live.traced.output_tokens
        self.meter.finished(traced, at_s - live.first_s, at_s - traced.arrival_s)
        itl_s = (at_s - live.first_s) / (tokens - 1) if tokens > 1 else None
        arrival_s = traced.arrival_s
        self.outcome.add(arrival_s, live.first_s - arrival_s, itl_s, at_s - arrival_s, tokens)
        self.outcome.queued_ms.add(max(0.0, live.begun_s - traced.arrival_s) * 1000)

    # -- remote prefill --------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Prefill workers get what they have asked for; an idle one begins with the first it gets."""
        for worker, key in self._prefills.given():
            live = self._live[key]
            live.prefill, live.begun_s = worker, self.now_s
            traced = live.traced.with_blocks_of(worker.engine.model.settings.block_tokens)
            request = EngineRequest(key, traced.prompt_tokens, 1, traced.block_hashes, is_held=True)
            worker.engine.submit(request, self.now_s)
            self._step_prefill(worker)

    def _step_prefill(self, worker: SimulatedWorker) -> None:
        """Begin the worker's next step, if there is something to do; its end is the next event.

        It computes what the worker holds at this moment: what comes later waits for the step after it.
        """
        engine = worker.engine
        if engine.model.is_idle or engine.now_s > self.now_s:
            return
        if engine.step():
            self._at(engine.now_s, partial(self._step_prefill, worker))

    def _prefilled_at(self, key: str, at_s: float) -> None:
        self._at(at_s, partial(self._prefilled, key))

    def _prefilled(self, key: str) -> None:
        live = self._live[key]
        worker = live.prefill
        assert worker is not None
        worker.engine.model.release(key)
        self._at(self.now_s + REFILL_S, partial(self._acknowledge, worker))
        tokens = live.traced.prompt_tokens
        self._at(self.now_s + hand_off_s(tokens), partial(self._take_over, key))

    def _acknowledge(self, worker: SimulatedWorker) -> None:
        self._prefills.acknowledge(worker)
        self._hand_out()
        if not worker.in_flight and not worker.is_ready:
            self.pools.end_drained(self.now_s)

    def _take_over(self, key: str) -> None:
        """The decode worker has the KV entries; one that is leaving refuses, and another takes them."""
        live = self._live[key]
        assert live.decode is not None
        serving = self.pools.serving(Role.DECODE)
        if not live.decode.is_ready and serving:
            _unbook(live)
            self._book(live, serving)
        self._submit(key, live, is_remote=True)

    # -- workers ---------------------------------------------------------------------------------

    def _new_model(self, role: Role) -> EngineModel:
        engine, timing = self.settings.engines[role]
        return EngineModel(engine, timing)

    def _starting(self, each: SimulatedWorker) -> None:
        if self._is_first:
            self._serve(each)
        else:
            startup_s = self.settings.startup_s[each.worker.role]
            self._at(self.now_s + startup_s, partial(self._become_ready, each))

    def _serve(self, each: SimulatedWorker) -> None:
        self.pools.ready(each, self.now_s)
        if each.is_ready and each.worker.role is Role.PREFILL:
            self._prefills.ask(each)

    def _become_ready(self, each: SimulatedWorker) -> None:
        self._serve(each)
        while self._homeless and self.pools.serving(Role.DECODE):
            self._route(self._homeless.popleft())
        self._hand_out()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heappush(self._events, (at_s, self._sequence, event))


def _candidate(each: SimulatedWorker, overlap_blocks: int) -> Candidate:
    return Candidate(each.number, each.in_flight, each.prompt_blocks, each.prefill_blocks, overlap_blocks)


def _prefilled_there(live: _Live) -> None:
    """The worker has the whole prompt, computed or taken over."""
    assert live.decode is not None
    live.decode.prefill_blocks -= live.prefill_blocks
    live.prefill_blocks = 0


def _unbook(live: _Live) -> None:
    """The request has left its worker."""
    assert live.decode is not None
    _prefilled_there(live)
    live.decode.in_flight -= 1
    live.decode.prompt_blocks -= live.prompt_blocks


def _ignore(key: str, at_s: float) -> None:
    """A prefill worker's first token is not the client's."""
