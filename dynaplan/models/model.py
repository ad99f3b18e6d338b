"""The models of one deployment: their settings, their lifecycle, and the memory that they share.

A model is *loaded* while a worker of it holds memory. Memory is counted for each device, which is a GPU or,
where the box has none, the host (``HOST``). What the rules see is a ``ModelsObservation``: each model as it
is at one moment, and each device. What they answer is a ``Plan``: actions, and a sentence for each model
that was considered. Moments are monotonic seconds (``_s``); durations are seconds, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

from dynaplan.util.errors import IllegalTransition


class ModelState(Enum):
    """A stage in a model's life; see ``LIFECYCLE`` for the legal moves."""

    UNLOADED = "unloaded"
    """It has no worker and holds no memory."""
    LOADING = "loading"
    """Its worker starts, or wakes. It counts as loaded: nobody starts a second one."""
    READY = "ready"
    """It answers."""
    DRAINING = "draining"
    """It admits nothing, finishes what it answers, and then sleeps or is gone. Its memory is still held."""
    ASLEEP = "asleep"
    """Its worker is there and holds little memory; it wakes on the next request."""
    FAILED = "failed"
    """It could not be loaded. It holds no memory, and may be tried again from ``retry_at_s`` on."""


LIFECYCLE: Mapping[ModelState, frozenset[ModelState]] = {
    ModelState.UNLOADED: frozenset({ModelState.LOADING}),
    ModelState.LOADING: frozenset(
        {ModelState.READY, ModelState.DRAINING, ModelState.UNLOADED, ModelState.FAILED}
    ),
    ModelState.READY: frozenset({ModelState.LOADING, ModelState.DRAINING, ModelState.FAILED}),
    ModelState.DRAINING: frozenset({ModelState.UNLOADED, ModelState.ASLEEP}),
    ModelState.ASLEEP: frozenset(
        {ModelState.LOADING, ModelState.DRAINING, ModelState.UNLOADED, ModelState.FAILED}
    ),
    ModelState.FAILED: frozenset({ModelState.LOADING, ModelState.UNLOADED}),
}
"""The legal moves. ``READY -> LOADING`` is a model whose last worker has crashed and is started again;
``LOADING -> DRAINING`` a load that nobody waits for any more; ``ASLEEP -> UNLOADED`` a sleeper that died."""

LOADED = frozenset({ModelState.LOADING, ModelState.READY, ModelState.DRAINING, ModelState.ASLEEP})
"""The states in which a model has a worker."""

HOST = -1
"""The number of the device that is the host's memory."""


@dataclass(frozen=True)
class SleepLevel:
    """A way of sleeping that an engine has.

    ``wake_s`` is how long it takes to wake, ``kept_bytes`` what stays on each device, and ``host_bytes`` what
    is moved into the host's memory.
    """

    name: str
    wake_s: float
    kept_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class ModelPolicy:
    """What the owner says of one model, as far as the rules need it.

    - ``ttl_s``: it is put away after being idle for that long; 0 is never
    - ``power_saving_after_s``: it is unloaded, and does not sleep any more, after that long; 0 is never
    - ``is_pinned``: it is loaded when the deployment starts, and nothing makes it leave
    - ``priority``: 2 stays twice as long as 1; more than 0
    - ``min_stay_s``: it is not evicted sooner after it became ready
    - ``max_swap_wait_s``: for how long its requests let a loaded model be served first; None is three times
      its load time, over its priority
    - ``load_timeout_s``: for how long a request waits at most
    - ``devices``: the number of GPUs that its worker spans; 0 is a worker in the host's memory
    - ``allowed_devices``: the devices that it may have; empty is any. ``chosen_by`` are the owner's words
      for them and their number, empty where he leaves them to us
    - ``parts``: of a model that is spread over unequal GPUs, what each has of the memory that the fullest has
    - ``is_exclusive``: it shares its devices with no other model
    - ``claim_bytes``: the memory that it needs on each of them, where the owner says so; 0 leaves it to
      measurement and estimate
    - ``estimate_bytes``: the estimate for each device; 0 when there is none
    - ``estimate_load_s``: how long a load is expected to take before one was measured; 0 when nobody knows
    - ``sleep_levels``: how its engine can sleep, the quickest to wake first
    - ``max_workers``: the most workers that it may have at once, and ``requests_per_worker`` the requests of
      each above which a further one is started, where no planner says how many it wants
    - ``prefill``: the same of its prefill workers: what one of them needs, and how many there may be; None
      for a model whose workers compute prompts themselves
    """

    ttl_s: float = 1800.0
    power_saving_after_s: float = 0.0
    is_pinned: bool = False
    priority: float = 1.0
    min_stay_s: float = 0.0
    max_swap_wait_s: float | None = None
    load_timeout_s: float = 600.0
    devices: int = 1
    allowed_devices: frozenset[int] = frozenset()
    chosen_by: str = ""
    parts: Mapping[int, float] = field(default_factory=dict)
    is_exclusive: bool = False
    claim_bytes: int = 0
    estimate_bytes: int = 0
    estimate_load_s: float = 0.0
    sleep_levels: tuple[SleepLevel, ...] = ()
    max_workers: int = 1
    requests_per_worker: int = 8
    prefill: ModelPolicy | None = None


@dataclass(frozen=True)
class Constraints:
    """What may be loaded together by the owner's word, beside memory.

    ``leaves`` has for a model those that must be gone before it is loaded. It holds in one direction, as in
    llama-swap's groups: a model of a group that is not exclusive is loaded beside one of a group that is.
    ``together`` are the sets that may be loaded at once, where there are any (its matrix): a model that is in
    none of them is loaded alone.
    """

    leaves: Mapping[str, frozenset[str]] = field(default_factory=dict)
    together: tuple[frozenset[str], ...] = ()


NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True)
class ModelPolicies:
    """The models of the deployment by name, and what may be loaded together."""

    models: Mapping[str, ModelPolicy]
    constraints: Constraints = field(default_factory=Constraints)


@dataclass(frozen=True)
class Learnt:
    """What earlier loads and uses of a model have told; it is kept in the statefile.

    - ``memory_bytes``: what a worker held on each device when it was last ready, 0 before the first load
    - ``load_s``: how long its last load took, 0 before the first; waking is not a load
    - ``failed_memory_bytes``: the most memory on a device with which a load has failed for want of memory
    - ``last_use_unix_s``, ``ready_unix_s``: when it was last used, and last became ready
    """

    memory_bytes: int = 0
    load_s: float = 0.0
    failed_memory_bytes: int = 0
    last_use_unix_s: float = 0.0
    ready_unix_s: float = 0.0


NOTHING_LEARNT = Learnt()


@dataclass(frozen=True)
class ModelStatus:
    """One model at one moment, by the worker that stays longest; or a further worker of it.

    - ``replica_of``: the model whose further worker it is (``rules/replicas.py``); empty for a model
    - ``is_prefill``: it is a prefill worker of that model
    - ``since_s``: when it came into its state
    - ``last_use_s``: when it last began or finished to answer
    - ``in_flight``: the requests that it answers now; ``waiting`` those that wait for it, loaded or
      not, and ``oldest_arrival_s`` when the first of them came
    - ``waiting_since_s``: since when somebody has waited for it, with those who gave up since; infinity where
      that is not known to be before ``oldest_arrival_s``
    - ``load_asked_s``: when the owner asked to load it, None once that is done (``dynaplan load``, preload)
    - ``unload_asked``: the owner asked to unload it; until that is done
    - ``keep_until_s``: the owner keeps it from being idle too long until then (``dynaplan load --for``)
    - ``keep_alive_s``: takes the place of ``ttl_s``, by the last request (Ollama); 0 is at once, inf never
    - ``held_bytes``: the memory of its worker by device, as the driver sees it now; empty where it cannot
    - ``placed_on``: the devices that its worker was given, empty without one
    - ``learnt``: what earlier loads have told of it
    - ``sleep_level``: the level at which it sleeps, or will when it has drained; empty: it will be gone
    - ``has_failed_to_sleep``: its last sleep failed; it is not put to sleep again
    - ``sleep_failure``: why its worker cannot be put to sleep, or woken; empty where nothing is wrong
    - ``retry_at_s``: when a failed model may be tried again; infinity for one that can never start
    - ``reason``: why it is in its state; ``last_lines`` are those of its log, where it has failed
    - ``planned_workers``: the workers that its planner wants; None where none says so, and its requests count
    - ``planned_prefill_workers``: the prefill workers that its planner wants; None where none says so
    - ``history``: its last moves
    """

    name: str
    state: ModelState = ModelState.UNLOADED
    since_s: float = 0.0
    last_use_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    oldest_arrival_s: float = inf
    waiting_since_s: float = inf
    load_asked_s: float | None = None
    unload_asked: bool = False
    keep_until_s: float = 0.0
    keep_alive_s: float | None = None
    held_bytes: Mapping[int, int] = field(default_factory=dict)
    placed_on: tuple[int, ...] = ()
    learnt: Learnt = NOTHING_LEARNT
    sleep_level: str = ""
    has_failed_to_sleep: bool = False
    sleep_failure: str = ""
    retry_at_s: float = 0.0
    reason: str = ""
    last_lines: str = ""
    replica_of: str = ""
    is_prefill: bool = False
    planned_workers: int | None = None
    planned_prefill_workers: int | None = None
    history: tuple[str, ...] = field(default=(), compare=False)

    def moved(self, state: ModelState, now_s: float, why: str = "") -> ModelStatus:
        """Return the model in its next state.

        Raises IllegalTransition, with its history, for an illegal move.
        """
        story = (*self.history[-15:], f"{now_s:.3f} {self.state.value} -> {state.value}: {why}")
        if state not in LIFECYCLE[self.state]:
            raise IllegalTransition(
                f"model {self.name}: {self.state.value} -> {state.value}\n  " + "\n  ".join(story)
            )
        return replace(self, state=state, since_s=now_s, reason=why, history=story)

    @property
    def is_loaded(self) -> bool:
        return self.state in LOADED


@dataclass(frozen=True)
class Device:
    """The memory of one GPU, or of the host, at one moment.

    ``foreign_bytes`` is what programs that are not workers of these models hold of it, what is left of
    workers that have gone included. ``unusable`` says why nothing may be loaded on it; empty if it may.
    """

    index: int
    total_bytes: int
    foreign_bytes: int = 0
    unusable: str = ""


@dataclass(frozen=True)
class ModelsObservation:
    """All models and devices at one moment. A model of the settings that is missing here is unloaded."""

    models: tuple[ModelStatus, ...] = ()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Load:
    """Start the model's worker on these devices, with ``bytes_each`` of memory on each; also a FAILED one."""

    model: str
    devices: tuple[int, ...]
    bytes_each: int
    why: str

    @property
    def gpus(self) -> tuple[int, ...]:
        """Its devices that are GPUs; none for the host's memory."""
        return tuple(each for each in self.devices if each != HOST)


@dataclass(frozen=True)
class Wake:
    """Wake the model's sleeping worker."""

    model: str
    why: str


@dataclass(frozen=True)
class Sleep:
    """Admit no more requests, finish those in flight, and then sleep at that level."""

    model: str
    level: str
    why: str


@dataclass(frozen=True)
class Unload:
    """Admit no more requests, finish those in flight, then end the worker; of a loading model: at once."""

    model: str
    why: str


@dataclass(frozen=True)
class Refuse:
    """Answer the requests that wait for the model and came at ``arrived_until_s`` or before with an error.

    ``status`` is the HTTP status, ``retry_after_s`` the header ``Retry-After``; 0 is none.
    """

    model: str
    status: int
    why: str
    retry_after_s: float = 0.0
    arrived_until_s: float = inf


Action = Load | Wake | Sleep | Unload | Refuse


@dataclass(frozen=True)
class PlanStep:
    """One consideration about one model: ``stage`` is the rule that led to it, ``why`` a sentence."""

    model: str
    stage: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What is to be done now, in this order, and why. Planning again at ``next_at_s`` may give more actions.

    An action that has begun is seen in the next observation (as LOADING, as DRAINING), and is not repeated.
    """

    actions: tuple[Action, ...] = ()
    trail: tuple[PlanStep, ...] = ()
    next_at_s: float = inf
