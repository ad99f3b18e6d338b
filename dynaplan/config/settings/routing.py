"""Options of how a request finds its workers: the router, and whether prefill workers compute prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynaplan.config.settings.fields import NO_EFFECT, Settings, option

ROUTERS = ("round-robin", "random", "least-loaded", "kv-load", "kv")
"""The values of ``router``; what each does is in ``gateway/routing/routing_logic.py``."""


USUAL_QUEUE, USUAL_LENGTH_TOKENS = 2, 1000
"""``max-prefill-queue-size`` and ``max-local-prefill-length`` of Dynamo 0.2 to 0.3."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RoutingSettings(Settings):
    """Options of choosing a worker for a request.

    ``overlap_weight`` is what a block of the prompt that is not in a worker's cache costs in the mode ``kv``,
    in blocks that the worker already computes for others. ``router_temperature`` 0 always takes the cheapest
    worker. The last three bound what is remembered of prompts that were sent, where that has to stand for the
    blocks that an engine tells of itself.
    """

    router: str = option("round-robin", "How the Frontend chooses a worker", choices=ROUTERS)
    overlap_weight: float = option(
        16.0, "Weight of the cached prefix in the KV router's cost", least=0, name="kv-overlap-score-weight"
    )
    router_temperature: float = option(
        0.0, "Randomness of the KV router's choice; 0 always takes the cheapest worker", least=0
    )
    kv_events: bool = option(
        True, "Route by the blocks that engines say they hold; false predicts them from what was sent there"
    )
    router_replica_sync: bool = option(
        False, "Let the frontends of a deployment tell each other what they have sent where"
    )
    router_ttl_s: float = option(
        120.0, "Seconds for which a prompt that was sent to a worker is predicted to be in its cache", above=0
    )
    router_max_tree_size: int = option(
        2**20, "Blocks that are predicted at most; beyond it the ones unused for longest are dropped", least=1
    )
    router_prune_target_ratio: float = option(
        0.8, "Part of the predicted blocks that is kept when there are too many", above=0, most=1
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
    max_local_prefill_length_tokens: int | None = option(
        None,
        "Tokens up to which the decode worker computes a prompt, with `conditional-disagg`",
        least=0,
        shown="1000; 0 where queued prompts are dispatched by deadline",
    )
    max_prefill_queue_size: int | None = option(
        None,
        "Queued prompts from which on the decode worker computes prompts itself",
        least=0,
        shown="2; no limit where queued prompts are dispatched by deadline",
    )
    prefill_deadline_ms: float | None = option(
        None,
        "Time to the first token, ms, by which queued prompts are dispatched: those that cannot meet it any "
        "more wait behind the others; 0: in the order of arrival",
        least=0,
        shown="`ttft` of a Planner that plans for targets, else 0",
    )
    prefill_late_wait_s: float = option(
        15.0,
        "Seconds after its deadline from which on a late prompt comes before those in time now and then; "
        "after twice as long every second prompt that is taken is the oldest late one",
        least=0,
    )

    @property
    def longest_local_tokens(self) -> int:
        """Tokens of the longest prompt that the decode worker computes itself, with ``is_conditional``.

        By deadline none: a planner for targets counts every prompt for the prefill workers, and so it has
        them. In the order of arrival the default is the original's.
        """
        if self.max_local_prefill_length_tokens is not None:
            return self.max_local_prefill_length_tokens
        return 0 if self.prefill_deadline_ms else USUAL_LENGTH_TOKENS

    @property
    def most_queued(self) -> float:
        """Queued prompts from which on the decode worker computes prompts itself; infinite without a limit.

        A burst at one decode worker delays every token there. By deadline, prompts that are in time do not
        wait for the others, so that nothing is gained by it; in the order of arrival the default is the
        original's.
        """
        if self.max_prefill_queue_size is not None:
            return self.max_prefill_queue_size
        return math.inf if self.prefill_deadline_ms else USUAL_QUEUE


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ComponentSettings(Settings):
    """The names of the two services whose workers the Frontend sends to and the planner scales."""

    decode_component: str = option("VllmWorker", "The service whose workers decode")
    prefill_component: str = option("PrefillWorker", "The service whose workers prefill")


DECODE_COMPONENT = ComponentSettings.decode_component
PREFILL_COMPONENT = ComponentSettings.prefill_component
