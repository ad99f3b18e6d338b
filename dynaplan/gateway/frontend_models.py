"""The models behind one address: which one a request is for, and what belongs to each.

A deployment of one model has one that takes every name its workers know. One with a section ``Models`` has
several; each is loaded on request, and has a queue of the requests that wait for it (``model_queue``).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.model_keys import ModelReport
from dynaplan.gateway.keys.keyring import KeyHolder
from dynaplan.gateway.kv_routing.router_inputs import FrontendRouterInputs
from dynaplan.gateway.model_documents import LLAMA_CPP_STATUS, status_document
from dynaplan.gateway.model_queue import ModelQueue
from dynaplan.gateway.ollama_api import LATEST
from dynaplan.gateway.openai_api import ApiError, Call, nested_too_deep
from dynaplan.gateway.prefill.remote_prefill import RemotePrefill
from dynaplan.gateway.routing.key_turns import Turns
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.gateway.routing.stalled_workers import StalledWorkers
from dynaplan.gateway.routing.worker_router import WorkerRouter
from dynaplan.models.files.imported_model import MatchRule, RequestFilters
from dynaplan.models.model import ModelState
from dynaplan.routing.routing_logic import KV_MODE
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import nearest
from dynaplan.util.masking import mask_secrets
from dynaplan.util.sockets import listens_on_loopback
from dynaplan.worker.routers import EVERY_COMPONENT

NO_FILTERS = RequestFilters()

ENGINES_SLOT = "id_slot"
"""llama.cpp's field for the slot of a request. Editors' plug-ins send one; among several workers, and where
KV entries are handed over, it has no meaning, and is left out.
"""


@dataclass(frozen=True)
class FrontendModel:
    """One model as the frontend serves it. ``queue`` is None where it is not loaded on request.

    ``name`` is the one that its workers know; empty where they say their names themselves.
    """

    name: str
    settings: FrontendSettings
    router: WorkerRouter
    prefill: RemotePrefill
    queue: ModelQueue | None = None
    aliases: tuple[str, ...] = ()
    filters: RequestFilters = NO_FILTERS
    upstream_name: str = ""
    is_unlisted: bool = False
    component: str = ""
    display_name: str = ""
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What starts its server, where its owner wrote that, without its secrets."""
        command = self.worker_options.get("command") or ""
        return str(mask_secrets(shlex.join(map(str, command)) if isinstance(command, list) else command))

    @property
    def worker_options(self) -> Mapping[str, Any]:
        """The options of its workers: the model's file among them."""
        return self.settings.worker_options.get(self.component, {})

    @property
    def cards(self) -> list[Mapping[str, Any]]:
        """The cards of its registered workers."""
        return [instance.card for instance in self.router.instances]

    @property
    def names(self) -> set[str]:
        """Every name that it answers to: configured ones, those of adapters and of workers' models."""
        cards = self.cards
        names = {str(name) for card in cards for name in card.get("loras") or ()}
        if self.queue is None:
            names |= {str(card.get("model") or "") for card in cards} | {self.settings.model}
        return (names | {self.name, *self.aliases}) - {""}

    def shown(self) -> dict[str, Any]:
        """Return what its owner says of it to clients, as llama-swap lists it: only what is said."""
        meta = {"llamaswap": dict(self.metadata)} if self.metadata else {}
        said = {"name": self.display_name, "description": self.description, "meta": meta}
        return {name: value for name, value in said.items() if value}

    @property
    def report(self) -> ModelReport | None:
        """What the fleet plugin says of it last; None where it is not loaded on request, or not said yet."""
        return self.queue.report if self.queue else None

    @property
    def state(self) -> ModelState:
        """Its state by the report; where it is not loaded on request, by whether it has a worker."""
        if self.queue is None:
            return ModelState.READY if self.router.instances else ModelState.UNLOADED
        known = (each for each in ModelState if self.report and self.report.state == each.value)
        return next(known, ModelState.UNLOADED)

    @property
    def status(self) -> dict[str, Any]:
        """Its ``status`` in llama.cpp's words."""
        return status_document(self.state, self.report.why if self.report else "")

    def addressed(self, call: Call) -> Call:
        """Return the call as the workers get it: under the name that they know, with its parameters.

        A large body stays as it is, and a form. Raises ApiError (400) for a body that is nested too deep.
        """
        is_kept = self.sent_name(call.model) == call.model and self.filters is NO_FILTERS
        if (is_kept and ENGINES_SLOT not in call.document) or call.endpoint.is_form or not call.is_whole:
            return call
        document = self.changed(call.document, is_computed=call.endpoint.is_computed)
        try:
            body = json.dumps(document).encode()
        except RecursionError:
            raise nested_too_deep() from None
        return structs.replace(call, model=self.name or document["model"], body=body, document=document)

    def sent_name(self, asked: str) -> str:
        """Return the name that its workers get in the place of the one that was asked for."""
        if self.queue is not None:
            return self.upstream_name or self.name
        is_tagged = asked.endswith(LATEST) and asked not in self.names
        return asked.removesuffix(LATEST) if is_tagged else asked

    def changes_requests_for(self, asked: str) -> bool:
        """Tell whether its workers get other bodies than clients send that ask for it by that name."""
        return self.sent_name(asked) != asked or self.filters is not NO_FILTERS

    def changed(self, document: Mapping[str, Any], *, is_computed: bool = True) -> dict[str, Any]:
        """Return a request's body as its workers get it: their name of the model, no slot of an engine.

        The model's filters are applied where a model computes for it (``is_computed``).
        """
        filtered = self.filters.apply(document) if is_computed else document
        kept = {name: value for name, value in filtered.items() if name != ENGINES_SLOT}
        return {**kept, "model": self.sent_name(str(document.get("model") or ""))}


class FrontendModels:
    """All models of one frontend; ``all`` has at least one."""

    def __init__(self, models: Sequence[FrontendModel]) -> None:
        self.all = tuple(models)
        self._by_name = {name: each for each in self.all for name in (each.name, *each.aliases)}
        self._asked: dict[str, tuple[FrontendModel, tuple[Instance, ...]]] = {}

    @property
    def are_on_demand(self) -> bool:
        """True where the models are loaded on request."""
        return self.all[0].queue is not None

    @property
    def are_reported(self) -> bool:
        """True once the fleet plugin has published what it knows of models that are loaded on request."""
        return any(each.queue.was_reported for each in self.all if each.queue)

    @property
    def routes_to(self) -> str:
        """The component whose workers get requests, as the frontend registers it: one, or every component."""
        return EVERY_COMPONENT if self.are_on_demand else self.all[0].settings.decode_component

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every registered worker of a model."""
        return tuple(instance for each in self.all for instance in each.router.instances)

    def find(self, name: str) -> FrontendModel:
        """Return the model of that name.

        Raises ApiError: 404 for an unknown name, 503 where no worker has said yet how its model is called.
        """
        asked = self._asked.get(name)
        if asked and asked[0].router.instances is asked[1]:  # as at the last request: the same workers
            return asked[0]
        if self.are_on_demand and name in self._by_name:
            return self._by_name[name]
        found = next((each for each in self.all if name in each.names), None) or self._find_tagged(name)
        if found:
            self._asked[name] = found, found.router.instances
            return found
        known = self.names()
        if not known:
            raise self.all[0].router.no_worker_error(
                "No worker has said yet which model it serves. Try again."
            )
        raise ApiError(
            404,
            f"The model {name!r} does not exist. {nearest(name, known)}",
            code="model_not_found",
            param="model",
            metric="not_found",
        )

    def _find_tagged(self, name: str) -> FrontendModel | None:
        """Return the model of that name with Ollama's ``:latest`` added or removed; None if unknown."""
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else f"{name}{LATEST}"
        return next((each for each in self.all if other in each.names), None)

    def names(self) -> set[str]:
        """Return every name that a client may use."""
        return {name for each in self.all for name in each.names}

    def usable_by(self, holder: KeyHolder | None) -> list[FrontendModel]:
        """Return the models that the holder of a key may use; all models for None."""
        return [each for each in self.all if holder is None or holder.may_use(each.names)]

    def documents(
        self, created_s: int, holder: KeyHolder | None = None, *, with_unlisted: bool = False
    ) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models`` for the holder of a key, by name."""
        shown = [each for each in self.usable_by(holder) if with_unlisted or not each.is_unlisted]
        return [
            {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "dynaplan",
                **({"status": {"value": LLAMA_CPP_STATUS[each.state]}} if each.queue else {}),
                **each.shown(),
            }
            for name, each in sorted(
                ((name, each) for each in shown for name in each.names), key=lambda found: found[0]
            )
        ]

    def stop_routing_to(self, instance_id: int) -> int:
        """Stop choosing this instance; return the number of this frontend's requests in flight there."""
        return sum(each.router.stop_routing_to(instance_id) for each in self.all)

    def in_flight_at(self, instance_id: int) -> int:
        """Return the number of this frontend's requests in flight at this instance."""
        return sum(each.router.in_flight_at(instance_id) for each in self.all)

    @property
    def remote_prefills(self) -> tuple[RemotePrefill, ...]:
        """The remote prefill of each disaggregated model, and the one that all other models share."""
        return tuple(dict.fromkeys(each.prefill for each in self.all))

    def follow_fleet(self, fleet: str) -> None:
        """Take over what the fleet plugin publishes."""
        for each in self.all:
            if each.queue:
                each.queue.follow_fleet(fleet)
                each.router.wake_waiting()

    def follow_running_limits(self, prefix: str, keys: Mapping[str, str]) -> None:
        """Apply the limits of running requests that planners publish; a key is the prefix and a component."""
        for each in self.all:
            each.router.places.follow(keys.get(prefix + each.component, ""))


def on_demand_model(
    model: ServedModel,
    settings: FrontendSettings,
    discovery: Discovery,
    prefill: RemotePrefill,
    inputs: FrontendRouterInputs,
    sleeping: SleepingWorkers,
    stalled: StalledWorkers,
) -> FrontendModel:
    """Return a model that is loaded on request, with a router and a queue of its own."""
    queue = ModelQueue(model, shows_lines=listens_on_loopback(settings.host) or bool(settings.api_key))
    own = model.settings
    router = WorkerRouter(
        discovery,
        model.component,
        settings,
        inputs,
        fleet=queue,
        sleeping=sleeping,
        stalled=stalled,
        limit=own.concurrency_limit or 0,
        turns=turns_of(settings),
        frontends=settings.frontends,
    )
    return FrontendModel(
        model.name,
        settings,
        router,
        prefill,
        queue,
        tuple(own.aliases or ()),
        filters_of(own),
        own.upstream_name,
        own.unlisted,
        model.component,
        own.display_name,
        own.description,
        own.metadata or {},
    )


def turns_of(settings: FrontendSettings) -> Turns | None:
    """Return the turns of a model's requests; None where there are no keys that could take turns."""
    return Turns(settings.frontends) if settings.api_keys else None


def filters_of(settings: OnDemandSettings) -> RequestFilters:
    """Return what is changed in a model's requests."""
    rules = tuple(MatchRule(**rule) for rule in settings.set_params_by_match or ())
    filters = RequestFilters(
        tuple(settings.strip_params or ()),
        settings.set_params or {},
        settings.set_params_by_name or {},
        rules,
    )
    return NO_FILTERS if filters == NO_FILTERS else filters


def on_demand_settings(settings: FrontendSettings) -> FrontendSettings:
    """Return the settings of routers of models that are loaded on request: by prefix nothing is to be gained.

    Each such model has one worker.
    """
    router = "least-loaded" if settings.router == KV_MODE else settings.router
    return replace(settings, router=router, kv_events=False, router_replica_sync=False)
