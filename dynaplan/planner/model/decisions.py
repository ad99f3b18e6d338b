"""The planner's decision, its memory between decisions, and the record of one decision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.planner.bursts.memory import BurstMemory
from dynaplan.planner.model.observation import Observation
from dynaplan.planner.model.sizing import Corrections, ErrorBudget, Prediction
from dynaplan.planner.model.targets import Step
from dynaplan.util.documents import check_types


@dataclass(frozen=True)
class Decision:
    """The numbers of workers asked for until now (``current``) and from now on (``desired``), with the trail.

    ``prediction`` is what the model expects of ``desired``, where targets were planned for and it is known.
    """

    current: Targets
    desired: Targets
    steps: tuple[Step, ...] = ()
    prediction: Prediction | None = None

    @property
    def is_change(self) -> bool:
        """True when there is anything to carry out."""
        return self.desired != self.current

    @property
    def reason(self) -> str:
        """Why, in one line: the steps that changed something, or else the last one."""
        changes = [step.why for step in self.steps if step.before != step.after]
        return "; ".join(changes or [step.why for step in self.steps[-1:]])

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Decision:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        steps = tuple(
            Step(each["stage"], Targets(**each["before"]), Targets(**each["after"]), each["why"])
            for each in document["steps"]
        )
        expected = document.get("prediction")
        prediction = Prediction(**expected) if expected else None
        return cls(Targets(**document["current"]), Targets(**document["desired"]), steps, prediction)


@dataclass(frozen=True)
class PlannerState:
    """All memory between two decisions.

    ``decode_grace_left`` is the number of coming intervals in which no decode worker is removed.
    ``pending_id`` is the decision that was not acknowledged at the last look, -1 for none, and
    ``pending_since_s`` when it was first seen so (monotonic). ``corrections`` compare engines with their
    profile. ``error_budget`` is what may still miss. ``wanted`` are the numbers of workers that the targets
    asked for in the last intervals, the newest last.
    """

    decode_grace_left: int = 0
    pending_id: int = -1
    pending_since_s: float = 0.0
    corrections: Corrections = field(default_factory=Corrections)
    error_budget: ErrorBudget = field(default_factory=ErrorBudget)
    wanted: tuple[Targets, ...] = ()
    bursts: BurstMemory = field(default_factory=BurstMemory)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back."""
        document = asdict(replace(self, bursts=BurstMemory()))
        del document["bursts"]
        return {**document, **self.bursts.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlannerState:
        """Read the form of ``to_json``; KeyError or TypeError for another."""
        own = dict(document)
        bursts = {name: own.pop(name, {}) for name in ("standing", "hedge")}
        return cls(
            **{
                **own,
                "corrections": Corrections(**document.get("corrections", {})),
                "error_budget": ErrorBudget(**document.get("error_budget", {})),
                "wanted": tuple(Targets(**each) for each in document.get("wanted", ())),
                "bursts": BurstMemory.from_json(bursts),
            }
        )

    def noting(self, desired: DesiredCounts, at_s: float) -> PlannerState:
        """Return the state after a look at ``at_s`` at which decision is pending."""
        if not desired.is_pending:
            return replace(self, pending_id=-1, pending_since_s=0.0)
        if desired.decision_id == self.pending_id:
            return self
        return replace(self, pending_id=desired.decision_id, pending_since_s=at_s)

    def one_interval_on(self) -> PlannerState:
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
            "decision": asdict(self.decision),
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


REMOVED_OPTIONS = frozenset({"adaptive-interval", "recommend-every", "shadow"})
"""Options of earlier versions, which their records name: none of them changes what an interval decides."""


def _known_options(recorded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recorded.items() if name not in REMOVED_OPTIONS}


def fingerprint(settings: PlannerSettings) -> str:
    """Return twelve hexadecimal digits that differ whenever an option differs."""
    text = json.dumps(settings.to_options(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
