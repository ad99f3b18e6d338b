"""Options of the Frontend and of what lives in its process: how a request finds its workers.

That is the router, which chooses a worker, and remote prefill: whether prefill workers compute prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.settings.fields import NO_EFFECT, READ, WRITTEN, Settings, Texts, option
from dynaplan.config.settings.models import ServedModel

ROUTERS = ("round-robin", "random", "least-loaded", "kv-load", "kv")
"""The values of ``router``; what each does is in ``routing/routing_logic.py``."""


DEFAULT_QUEUE_SIZE, DEFAULT_LOCAL_LENGTH_TOKENS = 2, 1000
"""``max-prefill-queue-size`` and ``max-local-prefill-length`` of Dynamo 0.2 to 0.3."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RoutingSettings(Settings):
    """Options of choosing a worker for a request.

    ``overlap_weight`` is what a block of the prompt that is not in a worker's cache costs in the mode ``kv``,
    in blocks that the worker already computes for others. ``router_temperature`` 0 always takes the cheapest
    worker. The last three bound what is remembered of prompts that were sent, where that has to stand for the
    blocks that an engine reports of itself.
    """

    router: str = option("round-robin", "How the Frontend chooses a worker", choices=ROUTERS)
    overlap_weight: float = option(
        16.0, "Weight of the cached prefix in the KV router's cost", minimum=0, name="kv-overlap-score-weight"
    )
    router_temperature: float = option(
        0.0, "Randomness of the KV router's choice; 0 always takes the cheapest worker", minimum=0
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
        2**20,
        "Blocks that are predicted at most; beyond it the ones unused for longest are dropped",
        minimum=1,
    )
    router_prune_target_ratio: float = option(
        0.8, "Part of the predicted blocks that is kept when there are too many", above=0, maximum=1
    )
    router_num_threads: int | None = option(None, NO_EFFECT, minimum=1)
    min_workers: int | None = option(None, NO_EFFECT, minimum=0)


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
        minimum=0,
        default_text="1000; 0 where queued prompts are dispatched by deadline",
    )
    max_local_running: int | None = option(
        None,
        "Requests at a decode worker beyond which it computes no prompt, with `conditional-disagg`",
        minimum=0,
        default_text="no limit",
    )
    max_prefill_queue_size: int | None = option(
        None,
        "Queued prompts from which on the decode worker computes prompts itself",
        minimum=0,
        default_text="2; no limit where queued prompts are dispatched by deadline",
    )
    prefill_deadline_ms: float | None = option(
        None,
        "Time to the first token, ms, by which queued prompts are dispatched: those that cannot meet it any "
        "more wait behind the others; 0: in the order of arrival",
        minimum=0,
        default_text="`ttft` of a Planner that plans for targets, else 0",
    )
    prefill_late_wait_s: float = option(
        15.0,
        "Seconds after its deadline from which on a late prompt comes before those in time now and then; "
        "after twice as long every second prompt that is taken is the oldest late one",
        minimum=0,
    )

    @property
    def max_local_tokens(self) -> int:
        """Tokens of the longest prompt that the decode worker computes itself, with ``is_conditional``.

        By deadline none: a planner for targets counts every prompt for the prefill workers, and so it has
        them. In the order of arrival the default is Dynamo's.
        """
        if self.max_local_prefill_length_tokens is not None:
            return self.max_local_prefill_length_tokens
        return 0 if self.prefill_deadline_ms else DEFAULT_LOCAL_LENGTH_TOKENS

    @property
    def max_queued(self) -> float:
        """Queued prompts from which on the decode worker computes prompts itself; infinite without a limit.

        A burst at one decode worker delays every token there. By deadline, prompts that are in time do not
        wait for the others, so that nothing is gained by it; in the order of arrival the default is Dynamo's.
        """
        if self.max_prefill_queue_size is not None:
            return self.max_prefill_queue_size
        return math.inf if self.prefill_deadline_ms else DEFAULT_QUEUE_SIZE


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ComponentSettings(Settings):
    """The names of the two services whose workers the Frontend sends to and the planner scales."""

    decode_component: str = option("VllmWorker", "The service whose workers decode")
    prefill_component: str = option("PrefillWorker", "The service whose workers prefill")


DECODE_COMPONENT = ComponentSettings.decode_component
PREFILL_COMPONENT = ComponentSettings.prefill_component


@dataclass(frozen=True)
class FrontendSettings(RoutingSettings, ComponentSettings):
    """Options of the Frontend.

    ``max_waiting_requests`` bounds the requests that have not begun to answer. The last nine are no options
    of this section, ``config/frontend.py`` finds them out: the models that are loaded on request, and the
    options of the workers that answer, by component (``worker_options``); how prompts
    are placed, and those of each of several models that is disaggregated; the name that clients must use
    (``model``, empty: any that the workers have); the directory where several frontends add up their metrics
    (``shared_metrics``, None for one frontend), and the number of ``frontends``; and the TTFT and ITL of the
    Planner's promise (``promised_ms``, None where its policy makes none), and of those of models that have
    planners of their own.
    """

    host: str = option("127.0.0.1", "The address to listen on; `--host` and `DYNAMO_HOST` come first")
    port: int = option(8000, "The public port; `--port` and `DYNAMO_PORT` come first", minimum=0)
    api_key: str = option("", "Key that clients must bear; better as `DYNAPLAN_API_KEY`")
    further_api_key: list[str] | None = option(
        None, "Keys that are as good as `api-key`, beside it", kind=Texts
    )
    api_keys: str | None = option(
        None, "File of the keys of several people, with the limits of each: `dynaplan keys`", path=READ
    )
    allowed_hosts: list[str] | None = option(
        None,
        "Names by which clients may call it on loopback without a key, beside this machine's; `*` is any",
        kind=Texts,
    )
    allowed_origins: list[str] | None = option(
        None,
        "Origins whose web pages may use it, beside this machine's: `https://chat.example`; `*` is any",
        kind=Texts,
    )
    max_waiting_requests: int = option(
        1024,
        "Requests at all frontends that may wait for their first token before new ones are answered 429",
        minimum=1,
    )
    max_body_bytes: int = option(16 * 1024 * 1024, "Largest request body, in bytes", minimum=1)
    max_bodies_bytes: int = option(
        256 * 1024 * 1024,
        "Memory for all request bodies of more than 64 kB at all frontends, in bytes; beyond it such "
        "requests are answered 503",
        minimum=1,
    )
    body_timeout_s: float = option(
        60.0, "Seconds that a client may take to send its request's body", minimum=0.001
    )
    head_timeout_s: float = option(
        30.0, "Seconds that a client may take to send a request's line and headers", minimum=0.001
    )
    write_timeout_s: float = option(
        60.0,
        "Seconds after which a client that reads nothing of its answer loses its connection and its request",
        minimum=0.001,
    )
    idle_timeout_s: float = option(
        75.0, "Seconds for which a connection without a request is kept open", minimum=0.001
    )
    max_connections: int = option(
        0,
        "Connections of each frontend at most; 0 is half of the files that the process may open, up to 8192",
        minimum=0,
    )
    worker_wait_s: float = option(
        15.0, "Seconds that a request waits for a worker when there is none", minimum=0
    )
    prefill_wait_s: float = option(30.0, "Seconds that a request waits for its remote prefill", minimum=0)
    migration_limit: int = option(
        3, "Times that a stream goes on at another worker when its own has died; 0: it is cut", minimum=0
    )
    migration_stall_s: float = option(
        5.0,
        "Seconds that a worker may stand still, with its streams, until another goes on with them",
        minimum=0,
    )
    record_traffic: str | None = option(
        None, "File that the lengths and times of every request are appended to", path=WRITTEN
    )
    allow_media_urls: bool = option(
        False, "Let engines fetch images and sounds from addresses that clients name, your network's too"
    )
    page: bool = option(True, "Have the web page at `/ui`, for a browser that `dynaplan ui` has let in")
    access_log: bool = option(False, "Log a line for each request: id, model, worker, tokens, TTFT")
    endpoint: str | None = option(None, NO_EFFECT)
    endpoint_chat: str | None = option(None, NO_EFFECT)
    endpoint_completions: str | None = option(None, NO_EFFECT)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    disaggregation_by_model: Mapping[str, DisaggregationSettings] = field(default_factory=dict)
    model: str = ""
    shared_metrics: str | None = None
    frontends: int = 1
    promised_ms: tuple[float, float] | None = None
    promised_ms_by_model: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    models: tuple[ServedModel, ...] = ()
    worker_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(init=False, repr=False, eq=False)
class ProcessorSettings(Settings):
    """Options of the Processor's section alone; routing is in the Frontend's too."""

    prompt_template: str | None = option(None, NO_EFFECT)


@dataclass(init=False, repr=False, eq=False)
class RouterSettings(Settings):
    """Options of the Router's section alone; routing is in the Frontend's too."""

    indexer: str | None = option(None, NO_EFFECT)


def part_of_limit(limit: int, frontends: int) -> int:
    """Return one frontend's part of a limit that all on its port share: rounded down, 1 at least."""
    return max(1, limit // frontends)
