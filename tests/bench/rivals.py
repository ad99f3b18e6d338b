"""What other systems do with several models in the same memory, as far as their sources and issues tell.

``python -m tests.bench rivals`` prints an hour of each load under their rules and ours.

- ``llama-swap``: its FIFO scheduler (internal/router/scheduler/fifo.go) with a matrix of all sets of models
  that fit the memory. Requests of a ready model pass at once. Those of others are parked, and gone through in
  order of arrival: one is served when the fewest models that would have to stop have nothing to do. Nobody
  ever waits for a turn, so a model that is kept busy stays.
- ``ollama``: one pending request at a time, which blocks all behind it, those of loaded models, too
  (server/sched.go). It stops the first idle runner by (keep-alive, name), else it waits for the first one to
  finish.
- ``lru-N``: llama.cpp's router with ``--models-max N``, the largest number that always fits: the least
  recently used goes, whatever it is doing, and what it answers is cut (llama.cpp 21678).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from dynaplan.lab.simulate.many_models import ManyModels, load_of, read_models
from dynaplan.models.model import Device, ModelState
from dynaplan.models.rules.eviction import EvictionChoice, choose
from dynaplan.models.rules.memory import Holding, Holdings, Need, holding, need, promise
from dynaplan.simulation.many_models.box import Box, BoxPolicy, SimulatedModel
from dynaplan.simulation.many_models.comparison import BoxOutcome, compare
from dynaplan.simulation.many_models.policies import Dynaplan, admit_ready
from tests.bench.table import Row


def _holdings(box: Box) -> Holdings:
    return {
        name: holding(worker.model.settings, worker.status, _need(box, name))
        for name, worker in box.workers.items()
        if worker.status.is_loaded
    }


def _need(box: Box, name: str) -> Need:
    worker = box.workers[name]
    return need(worker.model.settings, worker.status, box.devices)


def _loaded(box: Box) -> list[str]:
    return [name for name, worker in box.workers.items() if worker.status.is_loaded]


def _is_idle(box: Box, name: str) -> bool:
    worker = box.workers[name]
    return worker.status.state is ModelState.READY and not worker.in_flight and not worker.waiting


def _parked(box: Box) -> list[str]:
    """Return the models that are waited for and have no worker, the first request first."""
    waited = [
        (worker.waiting[0].arrival_s, name)
        for name, worker in box.workers.items()
        if worker.waiting and worker.status.state is ModelState.UNLOADED
    ]
    return [name for _, name in sorted(waited)]


def _put_away_idle(box: Box) -> float:
    """Unload what has been idle for its ``ttl``; return when the next will have been."""
    next_s = inf
    for name, worker in box.workers.items():
        ttl_s = worker.model.settings.ttl_s
        if ttl_s and _is_idle(box, name):
            until_s = max(worker.status.last_use_s, worker.status.since_s) + ttl_s
            if until_s <= box.now_s:
                box.drain(name)
            else:
                next_s = min(next_s, until_s)
    return next_s


class LlamaSwap:
    """First in, first out, but never over a busy model."""

    name = "llama-swap"

    def act(self, box: Box) -> float:
        admit_ready(box)
        next_s = _put_away_idle(box)
        taken = dict(_holdings(box))
        for name in _parked(box):
            choice = self._choose(box, name, taken)
            if choice is None or not all(self._may_stop(box, each) for each in choice.leaving):
                continue
            for each in choice.leaving:
                if box.workers[each].status.state is ModelState.READY:
                    box.drain(each)
            if not choice.leaving:
                box.load(name, choice.devices)
            taken = {each: held for each, held in taken.items() if each not in choice.leaving}
            taken[name] = promise(_need(box, name), choice.devices)
        return next_s

    def _choose(self, box: Box, name: str, taken: Holdings) -> EvictionChoice | None:
        return choose(_need(box, name), box.devices, taken, _loaded(box))

    def _may_stop(self, box: Box, name: str) -> bool:
        return _is_idle(box, name) or box.workers[name].status.state is ModelState.DRAINING


class Ollama:
    """One pending request at a time, and everybody behind it waits."""

    name = "ollama"

    def act(self, box: Box) -> float:
        next_s = _put_away_idle(box)
        while (name := self._pending(box)) is not None:
            if box.workers[name].status.state is ModelState.READY:
                box.admit(name, 1)
            elif not self._load_or_evict(box, name):
                break
        return next_s

    def _pending(self, box: Box) -> str | None:
        """Return the model of the first request of all; one that joins a load does not block."""
        states = (ModelState.UNLOADED, ModelState.READY, ModelState.DRAINING)
        waited = [
            (worker.waiting[0].number, name)
            for name, worker in box.workers.items()
            if worker.waiting and worker.status.state in states
        ]
        return min(waited)[1] if waited else None

    def _load_or_evict(self, box: Box, name: str) -> bool:
        """Load the model if it fits, and return True; else stop one runner, if none is being stopped yet."""
        if box.workers[name].status.state is not ModelState.UNLOADED:
            return False
        choice = choose(_need(box, name), box.devices, _holdings(box), [])
        if choice:
            box.load(name, choice.devices)
            return True
        loaded = sorted(_loaded(box))
        if not any(box.workers[each].status.state is ModelState.DRAINING for each in loaded):
            ready = [each for each in loaded if box.workers[each].status.state is ModelState.READY]
            idle = [each for each in ready if not box.workers[each].in_flight]
            if stopped := (idle or ready)[:1]:
                box.drain(stopped[0])
        return False


class LeastRecentlyUsed:
    """So many models, and the least recently used is ended for another."""

    def __init__(self, most: int) -> None:
        self.name = f"lru-{most}"
        self._most = most

    def act(self, box: Box) -> float:
        admit_ready(box)
        next_s = _put_away_idle(box)
        for name in _parked(box):
            choice = choose(_need(box, name), box.devices, _holdings(box), [])
            if choice and len(_loaded(box)) < self._most:
                box.load(name, choice.devices)
            elif not any(box.workers[each].status.state is ModelState.DRAINING for each in _loaded(box)):
                self._end_one(box)
        return next_s

    def _end_one(self, box: Box) -> None:
        ready = [
            (worker.status.last_use_s, name)
            for name, worker in box.workers.items()
            if worker.status.state is ModelState.READY
        ]
        if ready:
            box.kill(min(ready)[1])


def always_fitting(models: Mapping[str, SimulatedModel], devices: Sequence[Device]) -> int:
    """Return the largest number of models of which any so many fit: the largest ones do."""
    by_size = sorted(models.items(), key=lambda item: item[1].settings.claim_bytes, reverse=True)
    taken: dict[str, Holding] = {}
    for name, model in by_size:
        wanted = Need(name, model.settings.claim_bytes, model.settings.devices)
        choice = choose(wanted, devices, taken, [])
        if choice is None:
            break
        taken[name] = promise(wanted, choice.devices)
    return max(1, len(taken))


def policies(models: Mapping[str, SimulatedModel], devices: Sequence[Device]) -> list[BoxPolicy]:
    """Return our rules, and the three rivals for the same memory."""
    return [Dynaplan(), LlamaSwap(), Ollama(), LeastRecentlyUsed(always_fitting(models, devices))]


LOADS = (
    "popularity",
    "popularity:rate=0.05",
    "groups",
    "groups:pause=200",
    "agents",
    "agents:agents=6",
)
MODELS, GPUS, GPU_MEMORY_BYTES = "20,13,13,7,7,1", 2, 24_000_000_000


def rows(repeats: int) -> Iterator[Row]:
    """Yield, for each load and policy, the parts in time and the 95th percentiles of the waits, by seed."""
    for trace in LOADS:
        seeds = [_outcomes(trace, seed) for seed in range(1, repeats + 1)]
        for outcomes in zip(*seeds, strict=True):
            of = f"{trace}, {outcomes[0].policy}"
            longest, lost = max(each.wait_longest_s for each in outcomes), sum(each.lost for each in outcomes)
            note = f"longest wait {longest:.0f} s, lost {lost} of {sum(each.requests for each in outcomes)}"
            yield Row(f"{of}: in time", "%", [100 * each.in_time for each in outcomes], note=note)
            yield Row(f"{of}: waits, p95", "s", [each.wait_p95_s for each in outcomes])


def _outcomes(trace: str, seed: int) -> list[BoxOutcome]:
    models = read_models(MODELS)
    devices = [Device(index, GPU_MEMORY_BYTES) for index in range(GPUS)]
    chains, duration_s = load_of(ManyModels(trace, models, GPUS, GPU_MEMORY_BYTES, seed))
    return compare(chains, models, devices, duration_s, policies(models, devices))
