"""The keys and documents of the key-value store about models that are loaded on request.

1. *Demand*, ``v1/{namespace}/model_demand/{frontend's instance id}``, under the frontend's lease: the
   numbers of waiting and of running requests of each model.
2. *Orders*, ``v1/{namespace}/planner_extensions/models``: what a user has asked for, by ``dynaplan
   load``, ``unload``, ``pin`` and ``unpin``. One JSON object, by model; also kept in the statefile.
3. *Reports*, in the field ``models`` of the published fleet: the state of each model, and why requests for it
   are refused, if they are.
4. *Planned workers*, ``v1/{namespace}/planner_extensions/model_workers``: how many workers each model with a
   planner of its own asks for, written by the planners' process. One JSON object of numbers, by pool: the
   model's name for its decode workers, another for its prefill workers. The numbers are advisory:
   ``models/rules/replicas.py`` decides within the memory that there is.

Times are in Unix seconds (``_unix_s``): they are read by other processes, and after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Any

from dynaplan.store.instances import InstanceKeys
from dynaplan.util.documents import (
    number_field,
    object_field,
    parse_object,
    text_field,
    whole_field,
)

MODEL_DEMAND = InstanceKeys("model_demand")
"""The instance is a frontend; the value is what ``demand_text`` makes."""

MODEL_ORDERS = "models"
"""The name of the key of the orders, one of ``store_keys.EXTENSIONS``."""

MODEL_WORKERS = "model_workers"
"""The name of the key of the planned workers, one of ``store_keys.EXTENSIONS``."""

MODELS_FIELD = "models"
"""The field of the published fleet with the reports, by the model's name."""


def planned_workers_in(text: str) -> dict[str, int]:
    """Read the numbers of planned workers; raises ValueError for anything else. An empty text has none."""
    document = parse_object(text or "{}")
    return {name: max(0, whole_field(document, name)) for name in document}


def planned_workers_text(workers: Mapping[str, int]) -> str:
    """Write the numbers of planned workers."""
    return json.dumps(dict(sorted(workers.items())), separators=(",", ":"))


@dataclass(frozen=True)
class ModelDemand:
    """The requests for one model: those that wait, since when, those that are answered, and the last use.

    ``keep_alive_s`` is for how long the last request wants it to stay idle, None where it does not say.
    """

    waiting: int = 0
    oldest_unix_s: float = 0.0
    in_flight: int = 0
    last_use_unix_s: float = 0.0
    keep_alive_s: float | None = None

    def plus(self, other: ModelDemand) -> ModelDemand:
        """Return the demand of two frontends together."""
        oldest = [each.oldest_unix_s for each in (self, other) if each.waiting]
        later = max((self, other), key=lambda each: (each.last_use_unix_s, each != NO_DEMAND))
        return ModelDemand(
            self.waiting + other.waiting,
            min(oldest, default=0.0),
            self.in_flight + other.in_flight,
            later.last_use_unix_s,
            later.keep_alive_s,
        )


NO_DEMAND = ModelDemand()


def demand_text(demand: Mapping[str, ModelDemand]) -> str:
    """Write one frontend's demand; models without any are left out."""
    said = {name: asdict(each) for name, each in sorted(demand.items()) if each != NO_DEMAND}
    return json.dumps(said, separators=(",", ":"))


def demand_in(texts: Iterable[str]) -> dict[str, ModelDemand]:
    """Add up the demand of all frontends, by model; what cannot be read is left out."""
    sums: dict[str, ModelDemand] = {}
    for text in texts:
        try:
            document = parse_object(text)
            read = {name: _demand(object_field(document, name)) for name in document}
        except ValueError:
            continue
        for name, each in read.items():
            sums[name] = sums.get(name, NO_DEMAND).plus(each)
    return sums


def _demand(document: Mapping[str, Any]) -> ModelDemand:
    return ModelDemand(
        max(0, whole_field(document, "waiting", 0)),
        number_field(document, "oldest_unix_s", 0.0),
        max(0, whole_field(document, "in_flight", 0)),
        number_field(document, "last_use_unix_s", 0.0),
        None if document.get("keep_alive_s") is None else number_field(document, "keep_alive_s"),
    )


@dataclass(frozen=True)
class ModelOrder:
    """What a person has asked for one model. ``is_pinned`` None leaves it to the configuration.

    The later of ``load_unix_s`` and ``unload_unix_s`` counts, 0 is never. An order is done once the model has
    been loaded, or has left, since: nobody has to take it back.
    """

    load_unix_s: float = 0.0
    unload_unix_s: float = 0.0
    keep_until_unix_s: float = 0.0
    is_pinned: bool | None = None


NO_ORDER = ModelOrder()


@dataclass(frozen=True)
class ModelOrders:
    """The orders of all models, by name."""

    by_model: Mapping[str, ModelOrder]

    @classmethod
    def from_text(cls, text: str) -> ModelOrders:
        """Read the key's value; raises ValueError for anything else. An empty text is no order."""
        document = parse_object(text or "{}")
        return cls({name: _order(object_field(document, name)) for name in document})

    def to_text(self) -> str:
        """Write the key's value."""
        said = {name: asdict(each) for name, each in sorted(self.by_model.items()) if each != NO_ORDER}
        return json.dumps(said, separators=(",", ":"))

    def of(self, name: str) -> ModelOrder:
        """Return the order for that model; one that asks for nothing when there is none."""
        return self.by_model.get(name, NO_ORDER)

    def changed(self, name: str, **fields: Any) -> ModelOrders:
        """Return a copy in which the model's order has these fields."""
        return ModelOrders({**self.by_model, name: replace(self.of(name), **fields)})


def _order(document: Mapping[str, Any]) -> ModelOrder:
    pinned = document.get("is_pinned")
    if not isinstance(pinned, bool | None):
        raise ValueError(f"is_pinned is {pinned!r}: expected true, false or null")
    return ModelOrder(
        number_field(document, "load_unix_s", 0.0),
        number_field(document, "unload_unix_s", 0.0),
        number_field(document, "keep_until_unix_s", 0.0),
        pinned,
    )


@dataclass(frozen=True)
class Refusal:
    """Requests for a model that came until ``until_unix_s`` are answered with that status and sentence."""

    status: int
    why: str
    until_unix_s: float
    retry_after_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Workers of a model of one role, as the fleet plugin reports them.

    ``workers`` are their numbers by state, as ``counts.WorkerCounts`` has them, at most ``max_workers``. Each
    has ``gpus_each`` GPUs and takes ``memory_bytes`` of each of them. ``load_s`` is the usual time of a load,
    0 if unknown. ``planned_workers`` is the number that a planner asks for, None without one.
    """

    workers: Mapping[str, int] = field(default_factory=dict)
    max_workers: int = 1
    gpus_each: float = 0.0
    load_s: float = 0.0
    memory_bytes: int = 0
    planned_workers: int | None = None


@dataclass(frozen=True)
class ModelReport(PoolReport):
    """One model as the fleet plugin reports it, with its decode workers; ``prefill`` are others, if any.

    ``state`` is the value of a ``dynaplan.models.model.ModelState``, entered at ``since_unix_s``. ``why`` is
    the reason of the last decision about the model. ``gpus`` are the indices of all that its decode workers
    have. ``last_lines`` are the last lines of the log of one that has failed.
    """

    component: str
    state: str
    since_unix_s: float = 0.0
    why: str = ""
    is_pinned: bool = False
    gpus: tuple[int, ...] = ()
    leaves_unix_s: float = 0.0
    refusal: Refusal | None = None
    prefill: PoolReport | None = None
    last_lines: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, without the fields that are empty."""
        said = {name: value for name, value in vars(self).items() if value}
        nested = {"refusal": self.refusal, "prefill": self.prefill}
        return said | {name: asdict(each) for name, each in nested.items() if each}


MODEL_EVENTS = "model_events"
"""The field of the published fleet with what was last decided about models, the newest last."""

MAX_EVENTS = 16
"""The decisions that are published."""


@dataclass(frozen=True)
class ModelEvent:
    """What was decided about one model, at ``at_unix_s`` on the wall clock, in a sentence."""

    at_unix_s: float
    model: str
    sentence: str


def model_events_in(fleet: Mapping[str, Any]) -> tuple[ModelEvent, ...]:
    """Read the decisions of a published fleet; what cannot be read is left out."""
    found = []
    listed = fleet.get(MODEL_EVENTS)
    for each in listed if isinstance(listed, list) else ():
        try:
            known = each if isinstance(each, dict) else {}
            at_unix_s = number_field(known, "at_unix_s")
            found.append(ModelEvent(at_unix_s, text_field(known, "model"), text_field(known, "sentence")))
        except ValueError:
            continue
    return tuple(found)


MODEL_MEMORY = "model_memory"
"""The field of the published fleet with the memory that models share, a report for each device."""

FOREIGN_STEP_BYTES = 10**8
"""What others hold is published in these steps: it changes all the time."""


@dataclass(frozen=True)
class DeviceReport:
    """The memory of one GPU, or of the machine (``index`` is that of ``models.model.HOST``), for models.

    ``total_bytes`` is what models may have together; of it ``foreign_bytes`` are held by other programs.
    """

    index: int
    total_bytes: int
    foreign_bytes: int = 0

    @classmethod
    def of(cls, index: int, total_bytes: int, foreign_bytes: int) -> DeviceReport:
        """Return the report of a device; what others hold is rounded down to ``FOREIGN_STEP_BYTES``."""
        return cls(index, total_bytes, foreign_bytes // FOREIGN_STEP_BYTES * FOREIGN_STEP_BYTES)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def devices_in(fleet: Mapping[str, Any]) -> tuple[DeviceReport, ...]:
    """Read the memory that models share in a published fleet; what cannot be read is left out."""
    found = []
    listed = fleet.get(MODEL_MEMORY)
    for each in listed if isinstance(listed, list) else ():
        try:
            known = each if isinstance(each, dict) else {}
            memory = (whole_field(known, name) for name in ("total_bytes", "foreign_bytes"))
            found.append(DeviceReport(int(number_field(known, "index")), *memory))
        except ValueError:
            continue
    return tuple(found)


@lru_cache(maxsize=1)
def published_reports(text: str) -> Mapping[str, ModelReport]:
    """Read the reports of a published fleet's text, as ``reports_in``; the last ones are kept.

    Every model of a frontend asks for them when another text is published.
    """
    try:
        return MappingProxyType(reports_in(parse_object(text)))
    except ValueError:
        return MappingProxyType({})


def reports_in(fleet: Mapping[str, Any]) -> dict[str, ModelReport]:
    """Read the reports of a published fleet, by model; what cannot be read is left out."""
    found = {}
    listed = fleet.get(MODELS_FIELD)
    for name, document in listed.items() if isinstance(listed, dict) else ():
        try:
            found[str(name)] = _report(document if isinstance(document, dict) else {})
        except ValueError:
            continue
    return found


def _report(document: Mapping[str, Any]) -> ModelReport:
    refusal, prefill = object_field(document, "refusal", {}), object_field(document, "prefill", {})
    return ModelReport(
        text_field(document, "component"),
        text_field(document, "state"),
        number_field(document, "since_unix_s", 0.0),
        text_field(document, "why", ""),
        bool(document.get("is_pinned")),
        tuple(each for each in document.get("gpus", ()) if isinstance(each, int)),
        number_field(document, "leaves_unix_s", 0.0),
        Refusal(
            whole_field(refusal, "status"),
            text_field(refusal, "why"),
            number_field(refusal, "until_unix_s", inf),
            number_field(refusal, "retry_after_s", 0.0),
        )
        if refusal
        else None,
        PoolReport(**_pool(prefill)) if prefill else None,
        text_field(document, "last_lines", ""),
        **_pool(document),
    )


def _pool(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``PoolReport``."""
    workers, planned = object_field(document, "workers", {}), document.get("planned_workers")
    return {
        "workers": {state: whole_field(workers, state) for state in workers},
        "max_workers": whole_field(document, "max_workers", 1),
        "gpus_each": number_field(document, "gpus_each", 0.0),
        "load_s": number_field(document, "load_s", 0.0),
        "memory_bytes": whole_field(document, "memory_bytes", 0),
        "planned_workers": planned if isinstance(planned, int) else None,
    }
