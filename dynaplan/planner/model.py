"""The values of a decision: traffic and load observed, demand forecast, sizes, the decision and its record.

All are frozen. What ``decisions.jsonl`` holds is read and written here: ``DecisionRecord``, ``PlannerState``,
``Observation``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.option_changes import OptionChange
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.contract.traffic import Lengths, Traffic, lengths_of, without_usual_bounds
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.option_memory import OptionMemory
from dynaplan.util.documents import check_types, without_defaults


@dataclass(frozen=True)
class DecisionStep:
    """One stage of a decision: worker counts before and after it, and why. "Unchanged" is a result too."""

    stage: str
    before: PoolSizes
    after: PoolSizes
    why: str


@dataclass(frozen=True)
class Demand:
    """Requests per second, and their lengths.

    ``prefix_hit_rate`` is the part of the prompts' tokens (0 to 1) that need not be computed.
    ``burstiness`` is the variance of the number of arrivals over its mean: 1 for independent clients
    (Poisson), 0 for a metronome. ``dispersions`` are the same at several time scales, each with the
    length of its windows in s, the shortest first; none where they are not known.
    """

    requests_per_s: float
    isl: Lengths
    osl: Lengths
    prefix_hit_rate: float = 0.0
    burstiness: float = 1.0
    dispersions: tuple[tuple[float, float], ...] = ()

    def scaled(self, factor: float) -> Demand:
        """Return the demand with ``factor`` times the requests per second, the rest left out at random.

        What exceeds the variance of independent arrivals shrinks with their number (thinning), so that one
        request in a long time is in no burst.
        """
        dispersions = tuple(
            (scale_s, max(0.0, 1 + (index - 1) * factor)) for scale_s, index in self.dispersions
        )
        return replace(self, requests_per_s=self.requests_per_s * factor, dispersions=dispersions)


@dataclass(frozen=True)
class Expected:
    """The forecast of one coming interval: its requests, and their mean lengths; None is "not known".

    ``ahead`` counts intervals after the newest measured one; ``why`` names the method.
    """

    requests: float | None = None
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    ahead: int = 1
    why: str = ""


@dataclass(frozen=True)
class TrafficForecast:
    """The forecast of the traffic of some coming intervals, the soonest first; recorded as ``foresight``.

    ``isl`` and ``osl`` are the histograms of recent requests, None where there were none; ``dispersion`` and
    ``prefix_hit_rate`` as in ``Traffic``, ``dispersions`` as in ``Demand``, averaged over the last minutes.
    """

    interval_s: float
    expected: tuple[Expected, ...] = ()
    isl: Lengths | None = None
    osl: Lengths | None = None
    dispersion: float | None = None
    prefix_hit_rate: float | None = None
    dispersions: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrafficForecast:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        expected = tuple(
            Expected(**{name: value for name, value in each.items() if name not in REMOVED_EXPECTED})
            for each in document.get("expected", ())
        )
        dispersions = tuple((float(each[0]), float(each[1])) for each in document.get("dispersions", ()))
        parts = {"expected": expected, "dispersions": dispersions, **lengths_of(document)}
        return cls(**{**document, **parts})


UNLIMITED = PoolSizes(10**9, 10**9)
"""The numbers of workers where nobody has set a maximum."""


@dataclass(frozen=True)
class WorkerLimits:
    """The bounds of the numbers of workers: GPUs in all, GPUs of one worker, minimums and maximums.

    An aggregated service has no prefill workers: its minimum of them is 0. ``most`` goes before ``least``.
    """

    max_gpus: int = 8
    prefill_gpus: int = 1
    decode_gpus: int = 1
    least: PoolSizes = field(default_factory=lambda: PoolSizes(1, 1))
    most: PoolSizes = UNLIMITED

    def cap(self, workers: PoolSizes) -> PoolSizes:
        """Return the smaller number for each role: of these and of ``most``."""
        return PoolSizes(min(workers.prefill, self.most.prefill), min(workers.decode, self.most.decode))

    def gpus(self, workers: PoolSizes) -> int:
        """Return the GPUs that these numbers of workers need."""
        return workers.prefill * self.prefill_gpus + workers.decode * self.decode_gpus


@dataclass(frozen=True)
class Corrections:
    """Factors by which the engines differ from their profile. Their meaning depends on ``sizing``.

    ``queueing``: how many times as long a step takes, of prefill and of decode (aggregated: decode only), as
    the last backtest refitted it (``planner/backtesting/record.py``). ``formula``: mean TTFT and mean ITL
    measured over the profile's, waiting included, anew in each interval (``planner/sizing/formula.py``).
    """

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, role: Role) -> float:
        return self.prefill if role is Role.PREFILL else self.decode

    def with_factor(self, role: Role, factor: float) -> Corrections:
        """Return these with another factor for that role."""
        return replace(self, **{role.value: factor})


@dataclass(frozen=True)
class ErrorBudget:
    """Requests that could have missed each target lately without breaking the promise.

    Below 0, that many too many missed. The past fades: what is one ``slo-window`` old counts 37 %
    (``planner/sizing/error_budget.py``).
    """

    ttft_requests: float = 0.0
    itl_requests: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The times that a number of workers gives a demand: at the targets' percentiles, and means; in ms.

    ``prefill_utilisation`` is the part of its time in which a prefill (or aggregated) worker computes
    prompts, ``kv_usage`` the mean part of the KV cache in use, ``batch`` the mean number of requests that
    one worker decodes at once. ``overload`` says what does not fit; the times are then infinite.
    """

    ttft_ms: float
    itl_ms: float
    mean_ttft_ms: float
    mean_itl_ms: float
    prefill_utilisation: float
    kv_usage: float
    batch: float
    overload: str = ""


@dataclass(frozen=True)
class Sizing:
    """The workers that a demand needs, and the steps of the trail.

    ``predict`` computes the ``prediction`` of their times, anew at each read, which takes longer than the
    size: of several sizes the chosen one's is read. None where nothing predicts, as with ``sizing: formula``.
    """

    workers: PoolSizes
    steps: tuple[DecisionStep, ...] = field(default=())
    predict: Callable[[], Prediction | None] | None = field(default=None, compare=False)

    @property
    def prediction(self) -> Prediction | None:
        return self.predict() if self.predict else None


@dataclass(frozen=True)
class AverageLoad:
    """The pulls of one interval, averaged. Numbers of workers are those at the last pull.

    They are of the registered ones that are awake; ``..._asleep`` are the others. ``changed`` says how
    the numbers of workers changed in the interval; "" when they did not.
    """

    pulls: int = 0
    kv_usage: float | None = None
    kv_missing: str = ""
    prefill_queue: float | None = None
    prefill_queue_first: float | None = None
    prefill_queue_last: float | None = None
    queue_missing: str = ""
    prefill_workers: int = 0
    decode_workers: int = 0
    changed: str = ""
    decode_asleep: int = 0
    prefill_asleep: int = 0


LOAD_ABOVE, LOAD_BELOW, LOAD_WITHIN = "above", "below", ""
"""The present load beside what the last backtest saw."""


@dataclass(frozen=True)
class SplitTrial:
    """A split that stood still in a backtest: its GPUs, and the part of the requests that met both targets.

    ``is_at_most``: it was given up when too many had missed, so no more than that part would have.
    """

    workers: PoolSizes
    gpus: int
    in_time: float
    is_at_most: bool = False


@dataclass(frozen=True)
class SplitRecord:
    """A split that stood in the window: the requests that came, and how many missed the TTFT and the ITL.

    ``late`` and ``long`` were measured, ``foretold_late`` and ``foretold_long`` are of the model.
    """

    workers: PoolSizes
    requests: float
    late: float
    long: float
    foretold_late: float
    foretold_long: float

    @property
    def missed(self) -> float:
        """The requests that missed the target that most of them missed: how many missed both is not known."""
        return max(self.late, self.long)


@dataclass(frozen=True)
class OptionTrial:
    """A backtest with another value of an option of a component's engines, beside its present one.

    With either value the part ``in_time_before`` or ``in_time_after`` of the requests met both targets.
    ``is_certain``: the gain is more than chance makes, and worth a change.
    """

    component: str
    option: str
    value_before: int
    value_after: int
    in_time_before: float
    in_time_after: float
    is_certain: bool = False

    def __str__(self) -> str:
        return f"{self.component}.{self.option} {self.value_before} -> {self.value_after}"


@dataclass(frozen=True)
class BacktestResult:
    """The latest result of a backtest: the cheapest ``workers`` that would have met the targets.

    ``workers`` is None if there is no result yet; ``missing`` says why there is none, no newer one, or why
    this one does not permit to scale down. It covers the ``requests`` that arrived in ``window_s`` seconds;
    ``tried`` are the splits (prefill and decode workers) that were compared, the chosen one first.
    ``is_new``: it was computed in this interval. ``change`` compares the load now with that of the window:
    ``LOAD_ABOVE``, ``LOAD_BELOW`` or ``LOAD_WITHIN``. ``peak_part`` is the fraction of the window's highest
    load that may come before a worker that is requested now is ready. ``corrections`` are the factors of step
    times with which it was simulated, ``stood`` the splits that stood in the window, the last one first;
    ``is_held``: more had missed there than was foretold, and so every split is said to miss more.
    ``best_trial`` is, of the options that were tried last, the trial with the most requests in time, be they
    fewer than at present.
    """

    workers: PoolSizes | None = None
    missing: str = ""
    requests: int = 0
    window_s: float = 0.0
    tried: tuple[SplitTrial, ...] = ()
    is_new: bool = False
    change: str = LOAD_WITHIN
    peak_part: float = 1.0
    corrections: Corrections = field(default_factory=Corrections)
    stood: tuple[SplitRecord, ...] = ()
    is_held: bool = False
    best_trial: OptionTrial | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BacktestResult:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        workers = document.get("workers")
        tried = tuple(
            SplitTrial(**{**each, "workers": PoolSizes(**each["workers"])})
            for each in document.get("tried", ())
        )
        chosen = None if workers is None else PoolSizes(**workers)
        stood = tuple(
            SplitRecord(**{**each, "workers": PoolSizes(**each["workers"])})
            for each in document.get("stood", ())
        )
        corrections = Corrections(**document.get("corrections", {}))
        option = document.get("best_trial")
        known = {name: value for name, value in document.items() if name not in REMOVED_RESULT}
        parts = {
            "workers": chosen,
            "tried": tried,
            "stood": stood,
            "corrections": corrections,
            "best_trial": OptionTrial(**option) if option else None,
        }
        return cls(**{**known, **parts})


@dataclass(frozen=True)
class Observation:
    """One adjustment interval; ``at_s`` is monotonic seconds.

    ``traffic`` and ``foresight`` are None for policies that do not plan for targets. ``startup_s`` is the
    time of a worker from start to ready, the slower role's. ``unknown`` says why the fleet and the desired
    counts could not be read, ``failure`` why the previous decision was not carried out; both are "" when
    all is well. ``holds`` are those in force. ``learnt`` is what the engines' counters have told so far,
    ``option_change`` the last change of an engine's option that a planner of this deployment has asked for.
    """

    at_s: float
    fleet: FleetCounts = field(default_factory=FleetCounts)
    desired: DesiredCounts = field(default_factory=DesiredCounts)
    load: AverageLoad = field(default_factory=AverageLoad)
    unknown: str = ""
    failure: str = ""
    traffic: Traffic | None = None
    foresight: TrafficForecast | None = None
    startup_s: float = 0.0
    holds: RoleHolds = field(default_factory=RoleHolds)
    backtest: BacktestResult | None = None
    learnt: LearntTimings = field(default_factory=LearntTimings)
    option_change: OptionChange | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back, without what has its default."""
        plain = replace(self, holds=RoleHolds(), learnt=LearntTimings())
        document, holds, learnt = without_defaults(plain), self.holds.to_json(), self.learnt.to_json()
        document |= {"learnt": learnt} if learnt else {}
        for name in {"traffic", "foresight"} & document.keys():
            document[name] = without_usual_bounds(document[name])
        return {"at_s": self.at_s, **document, **({"holds": holds} if holds else {})}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Observation:
        """Read the mapping that ``to_json`` makes; KeyError or TypeError for another."""
        traffic, foresight = document.get("traffic"), document.get("foresight")
        fleet, backtest = document.get("fleet", {}), document.get("backtest")
        change = document.get("option_change")
        return cls(
            at_s=document["at_s"],
            fleet=FleetCounts(
                WorkerCounts(**fleet.get("prefill", {})),
                WorkerCounts(**fleet.get("decode", {})),
                fleet.get("gpus_total", 0),
            ),
            desired=DesiredCounts(**document.get("desired", {})),
            load=AverageLoad(**document.get("load", {})),
            unknown=document.get("unknown", ""),
            failure=document.get("failure", ""),
            traffic=Traffic.from_json(traffic) if traffic else None,
            foresight=TrafficForecast.from_json(foresight) if foresight else None,
            startup_s=document.get("startup_s", 0.0),
            holds=RoleHolds.from_json(document.get("holds", {})),
            backtest=None if backtest is None else BacktestResult.from_json(backtest),
            learnt=LearntTimings.from_json(document.get("learnt") or {}),
            option_change=OptionChange(**change) if change else None,
        )


@dataclass(frozen=True)
class Decision:
    """The numbers of workers asked for until now (``current``) and from now on (``desired``), with the trail.

    ``prediction`` is what the model expects of ``desired``, where targets were planned for and it is known.
    """

    current: PoolSizes
    desired: PoolSizes
    steps: tuple[DecisionStep, ...] = ()
    prediction: Prediction | None = None

    @property
    def is_change(self) -> bool:
        """True when there is anything to carry out."""
        return self.desired != self.current

    @property
    def is_withheld(self) -> bool:
        """True when nothing changes though more workers are needed, or a pending decision is waited for."""
        needs_more = any(
            step.after.prefill > self.current.prefill or step.after.decode > self.current.decode
            for step in self.steps
        )
        is_waiting = bool(self.steps) and self.steps[-1].stage == "pending"
        return not self.is_change and (needs_more or is_waiting)

    @property
    def reason(self) -> str:
        """Why, in one line: the steps that changed something, or else the last one."""
        changes = [step.why for step in self.steps if step.before != step.after]
        return "; ".join(changes or [step.why for step in self.steps[-1:]])

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back.

        A step leaves out numbers that are those of the step before, and numbers that it does not change.
        """
        steps, now = [], self.current
        for step in self.steps:
            before = {"before": asdict(step.before)} if step.before != now else {}
            after = {"after": asdict(step.after)} if step.after != step.before else {}
            steps.append({"stage": step.stage, **before, **after, "why": step.why})
            now = step.after
        return {**asdict(replace(self, steps=())), "steps": steps}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Decision:
        """Read the mapping that ``to_json`` makes; KeyError or TypeError for another."""
        current, steps = PoolSizes(**document["current"]), []
        now = current
        for each in document["steps"]:
            before = PoolSizes(**each["before"]) if "before" in each else now
            now = PoolSizes(**each["after"]) if "after" in each else before
            steps.append(DecisionStep(each["stage"], before, now, each["why"]))
        expected = document.get("prediction")
        prediction = Prediction(**expected) if expected else None
        return cls(current, PoolSizes(**document["desired"]), tuple(steps), prediction)


@dataclass(frozen=True)
class Tuning:
    """What the planner has set of running workers; what is None is as it is configured.

    A decode worker computes prompts of up to ``max_local_prefill_tokens`` itself, while it has no more than
    ``max_local_running`` requests.
    """

    running_limit: RunningLimit | None = None
    max_local_prefill_tokens: int | None = None
    max_local_running: int | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Tuning:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        limit = document.get("running_limit")
        return cls(**{**document, "running_limit": RunningLimit(**limit) if limit else None})


@dataclass(frozen=True)
class PlannerState:
    """All memory between two decisions.

    ``decode_grace_left`` is the number of coming intervals in which no decode worker is removed.
    ``pending_id`` is the decision that was not acknowledged in the last interval, -1 for none, and
    ``pending_since_s`` when it was first seen so (monotonic). ``corrections`` compare engines with their
    profile. ``error_budget`` is what may still miss, ``tuning`` what is set besides numbers of workers,
    ``options`` what is remembered of engines' options that were changed.
    """

    decode_grace_left: int = 0
    pending_id: int = -1
    pending_since_s: float = 0.0
    corrections: Corrections = field(default_factory=Corrections)
    error_budget: ErrorBudget = field(default_factory=ErrorBudget)
    tuning: Tuning = field(default_factory=Tuning)
    options: OptionMemory = field(default_factory=OptionMemory)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back, without a tuning and options that say nothing."""
        document = asdict(replace(self, options=OptionMemory()))
        document["options"] = without_defaults(self.options)
        for name, nothing in (("tuning", Tuning()), ("options", OptionMemory())):
            if getattr(self, name) == nothing:
                del document[name]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlannerState:
        """Read the mapping that ``to_json`` makes; KeyError or TypeError for another."""
        budget = document.get("error_budget", {})
        return cls(
            **{
                **{name: value for name, value in document.items() if name not in REMOVED_STATE},
                "corrections": Corrections(**document.get("corrections", {})),
                "error_budget": ErrorBudget(
                    budget.get("ttft_requests", 0.0), budget.get("itl_requests", 0.0)
                ),
                "tuning": Tuning.from_json(document.get("tuning", {})),
                "options": OptionMemory.from_json(document.get("options", {})),
            }
        )

    def note_pending(self, desired: DesiredCounts, at_s: float) -> PlannerState:
        """Return the state after a look at ``at_s`` at which decision is pending."""
        if not desired.is_pending:
            return replace(self, pending_id=-1, pending_since_s=0.0)
        if desired.decision_id == self.pending_id:
            return self
        return replace(self, pending_id=desired.decision_id, pending_since_s=at_s)

    def after_interval(self) -> PlannerState:
        """Return the state with one interval of grace used up."""
        return replace(self, decode_grace_left=max(0, self.decode_grace_left - 1))


@dataclass(frozen=True)
class DecisionRecord:
    """One interval as it is written down: enough to decide it again, and to explain it.

    ``wall_time`` is ISO 8601 with its offset. ``decide(settings, state, observation)`` gives ``(next_state,
    decision)``.
    """

    wall_time: str
    settings: PlannerSettings
    state: PlannerState
    observation: Observation
    decision: Decision
    next_state: PlannerState = field(default_factory=PlannerState)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back; the settings' fingerprint is added."""
        return {
            "wall_time": self.wall_time,
            "fingerprint": fingerprint(self.settings),
            "settings": self.settings.to_options(),
            "state": self.state.to_json(),
            "observation": self.observation.to_json(),
            "decision": self.decision.to_json(),
            "next_state": self.next_state.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DecisionRecord:
        """Read the form of ``to_json``; raises KeyError, TypeError or ConfigError when it is not one."""
        record = cls(
            wall_time=document["wall_time"],
            settings=PlannerSettings.from_options(_known_options(document["settings"])),
            state=PlannerState.from_json(document["state"]),
            observation=Observation.from_json(document["observation"]),
            decision=Decision.from_json(document["decision"]),
            next_state=PlannerState.from_json(document["next_state"]),
        )
        check_types(record)
        return record


REMOVED_OPTIONS = frozenset(
    {"adaptive-interval", "hedge", "learnt-floor", "recommend-every", "scale-down-headroom", "shadow"}
)
"""Options of earlier versions, which their records name."""

REMOVED_PREDICTOR = ("load-predictor", "auto")
"""What earlier versions forecast with unless another predictor was named."""

REMOVED_STATE = frozenset({"standing", "hedge", "wanted"})
"""What earlier versions remembered from one interval to the next."""

REMOVED_RESULT = frozenset({"missed_lately"})
"""What earlier versions said of a backtest."""

REMOVED_EXPECTED = frozenset({"doubt", "surprise"})
"""What earlier versions knew of a forecast."""


def _known_options(recorded: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in recorded.items()
        if name not in REMOVED_OPTIONS and (name, value) != REMOVED_PREDICTOR
    }


def fingerprint(settings: PlannerSettings) -> str:
    """Return twelve hexadecimal digits that differ whenever an option differs."""
    text = json.dumps(settings.to_options(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
