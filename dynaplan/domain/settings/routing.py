"""Options of how a request finds its workers: the router, and whether prefill workers compute prompts."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.domain.settings.fields import NO_EFFECT, Settings, option

ROUTERS = ("round-robin", "random", "least-loaded", "kv-load", "kv")
"""The values of ``router``; what each does is in ``core/routing/choosing.py``."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RoutingSettings(Settings):
    """Options of choosing a worker for a request.

    ``overlap_weight`` is what a block of the prompt that is not in a worker's cache costs in the mode ``kv``,
    in blocks that the worker already computes for others.
    """

    router: str = option("round-robin", "How the Frontend chooses a worker", choices=ROUTERS)
    overlap_weight: float = option(
        1.0, "Weight of the cached prefix in the KV router's cost", least=0, name="kv-overlap-score-weight"
    )
    router_num_threads: int | None = option(None, NO_EFFECT, least=1)
    min_workers: int | None = option(None, NO_EFFECT, least=0)


@dataclass(frozen=True)
class DisaggregationSettings(Settings):
    """Options of remote prefill: prefill workers compute prompts.

    ``is_on``: remote prefill is wanted. ``is_conditional``: only for prompts that are long enough.
    """

    is_on: bool = option(False, "Let prefill workers compute prompts", name="remote-prefill")
    is_conditional: bool = option(
        False, "Decide for each request whether its prefill is remote", name="conditional-disagg"
    )
    max_local_prefill_length_tokens: int = option(
        1000, "Tokens up to which the decode worker computes a prompt, with `conditional-disagg`", least=0
    )
    max_prefill_queue_size: int = option(
        2, "Queued prompts from which on the decode worker computes prompts itself", least=0
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ComponentSettings(Settings):
    """The names of the two services whose workers the Frontend sends to and the planner scales."""

    decode_component: str = option("VllmWorker", "The service whose workers decode")
    prefill_component: str = option("PrefillWorker", "The service whose workers prefill")


DECODE_COMPONENT = ComponentSettings.decode_component
PREFILL_COMPONENT = ComponentSettings.prefill_component
