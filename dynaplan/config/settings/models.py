"""Options of a model that is loaded on request and put away when idle: its entry below ``Models:``.

An entry also has the options of the workers that serve the model, which ``WorkerSettings`` and the engines
declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.settings.fields import Duration, Settings, Size, Texts, option
from dynaplan.util.errors import ConfigError

DEFAULT_TTL_S = 1800.0
"""Seconds without a request after which a model that is loaded on request is put away."""


@dataclass(frozen=True)
class OnDemandSettings(Settings):
    """When a model is loaded, and when it leaves. Durations are in seconds, memory in bytes.

    ``max_swap_wait_s`` None is three times the measured load time. ``memory_bytes`` None: as estimated, and
    from the first load on as measured.
    """

    ttl_s: float = option(
        DEFAULT_TTL_S, "Time without a request after which the model is put away; 0 is never", kind=Duration
    )
    power_saving_after_s: float = option(
        0.0,
        "Time without a request after which it is stopped rather than asleep, to save power; 0 is never",
        kind=Duration,
    )
    pin: bool = option(False, "Load it at the start, and never put it away for another model")
    priority: float = option(1.0, "Weight against being put away for another model", above=0)
    aliases: list[str] | None = option(None, "Further names by which clients may ask for it", kind=Texts)
    memory_bytes: int | None = option(
        None,
        "Memory that one worker takes, where the estimate is wrong",
        name="memory",
        kind=Size,
        above=0,
        default_text="estimated, then measured",
    )
    min_stay_s: float = option(
        0.0, "Time after its load for which it is not put away for another model", kind=Duration
    )
    load_timeout_s: float = option(
        600.0, "Time that a request waits for the model before it is answered 503", kind=Duration
    )
    max_swap_wait_s: float | None = option(
        None,
        "Time that its requests wait at most for the turn of a model that is in use",
        kind=Duration,
        default_text="three times the measured load time",
    )
    max_workers: int = option(
        1,
        "The most workers that it may have at once",
        minimum=1,
        default_text="1; with a `Planner`, as many as its `max-gpu-budget` is for",
    )
    requests_per_worker: int = option(
        8, "Requests of each of its workers above which a further one is started, where memory is", minimum=1
    )
    max_queue: int = option(
        256, "Requests that may wait for the model before further ones are answered 429", minimum=1
    )
    concurrency_limit: int | None = option(
        None, "Requests that its engine gets at once; further ones wait in its queue", minimum=1
    )
    loading_comments: bool = option(
        True, "Tell clients with a stream how the load goes, in comments (`: loading ...`)"
    )
    preload: bool = option(False, "Load it at the start; it may leave as any other")
    not_beside: list[str] | None = option(
        None, "Models that leave before it is loaded, whatever fits; not the other way round", kind=Texts
    )
    unlisted: bool = option(False, "Leave it out of `/v1/models`; it can be asked for")
    upstream_name: str = option("", "The name that its workers are asked for", default_text="its own")
    strip_params: list[str] | None = option(None, "Fields that are taken out of its requests", kind=Texts)
    set_params: Mapping[str, Any] | None = option(
        None, "Fields that are set in its requests; `top_k?`: only where the client has not set it"
    )
    set_params_by_name: Mapping[str, Any] | None = option(
        None, "The same for requests by one of its names: name -> fields"
    )
    set_params_by_match: list[Mapping[str, Any]] | None = option(
        None, "The same for requests with a value in a field: a list of `{key: , match: , set: fields}`"
    )
    display_name: str = option("", "Its name for people, in `/v1/models` and `/running`")
    description: str = option("", "What it is, in a sentence, beside that name")
    metadata: Mapping[str, Any] | None = option(
        None, "Anything about it that clients are to find in `/v1/models`, below `meta`"
    )
    share: bool = option(True, "Share its GPUs with other models, by memory; false takes whole GPUs")

    def check(self, given: frozenset[str] = frozenset()) -> None:
        for rule in self.set_params_by_match or ():
            if not (isinstance(rule, Mapping) and set(rule) == {"key", "match", "set"}):
                raise ConfigError(
                    f"set-params-by-match has {rule!r}",
                    hint="Expected {key: FIELD, match: TEXT, set: {FIELD: value}}.",
                )


PREFILL_POOL_OPTIONS = ("memory", "max-workers", "requests-per-worker")
"""The options above that a model's prefill workers may have of their own; the others are the model's."""


def prefill_pool_name(model: str) -> str:
    """Return the name of the model's prefill workers; its decode workers go by the name of the model."""
    return f"{model} (prefill)"


@dataclass(frozen=True)
class WorkerPool:
    """The decode workers of a model, or its prefill workers: those of one service, its ``component``.

    ``settings`` are the model's, of prefill workers with those of their own.
    """

    name: str
    component: str
    model: str
    settings: OnDemandSettings
    is_prefill: bool = False


@dataclass(frozen=True)
class ServedModel:
    """One model of a deployment: its name, the service whose workers serve it, and when it is there.

    ``prefill`` is None unless the model is disaggregated; then the workers of ``component`` decode.
    """

    name: str
    component: str
    settings: OnDemandSettings = field(default_factory=OnDemandSettings)
    prefill: WorkerPool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which clients may ask for it."""
        return (self.name, *(self.settings.aliases or ()))

    @property
    def pools(self) -> tuple[WorkerPool, ...]:
        """Its decode workers, and after them its prefill workers where it is disaggregated."""
        decode = WorkerPool(self.name, self.component, self.name, self.settings)
        return (decode, self.prefill) if self.prefill else (decode,)
