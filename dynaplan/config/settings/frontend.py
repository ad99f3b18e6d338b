"""Options of the Frontend, and of the services that live in its process: Processor and Router."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaplan.config.settings.fields import NO_EFFECT, WRITTEN, Settings, option
from dynaplan.config.settings.routing import ComponentSettings, DisaggregationSettings, RoutingSettings


@dataclass(frozen=True)
class FrontendSettings(RoutingSettings, ComponentSettings):
    """Options of the Frontend.

    ``max_waiting_requests`` bounds the requests that have not begun to answer. The last four are no options
    of this section, ``config/frontend.py`` finds them out: how prompts are placed; the name that clients
    must use (``model``, empty: any that the workers have); the directory where several frontends add up
    their metrics (``shared_metrics``, None for one frontend); and the TTFT and ITL of the Planner's promise
    (``promised_ms``, None where its policy makes none).
    """

    host: str = option("127.0.0.1", "The address to listen on; `--host` and `DYNAMO_HOST` come first")
    port: int = option(8000, "The public port; `--port` and `DYNAMO_PORT` come first", least=0)
    api_key: str = option("", "Key that clients must bear; better as `DYNAPLAN_API_KEY`")
    max_waiting_requests: int = option(
        1024, "Requests that may wait for their first token before new ones are answered 429", least=1
    )
    max_body_bytes: int = option(16 * 1024 * 1024, "Largest request body, in bytes", least=1)
    max_bodies_bytes: int = option(
        256 * 1024 * 1024,
        "Memory for all request bodies of more than 64 kB together, in bytes; beyond it such requests are "
        "answered 503",
        least=1,
    )
    body_timeout_s: float = option(
        60.0, "Seconds that a client may take to send its request's body", least=0.001
    )
    head_timeout_s: float = option(
        30.0, "Seconds that a client may take to send a request's line and headers", least=0.001
    )
    write_timeout_s: float = option(
        60.0,
        "Seconds after which a client that reads nothing of its answer loses its connection and its request",
        least=0.001,
    )
    idle_timeout_s: float = option(
        75.0, "Seconds for which a connection without a request is kept open", least=0.001
    )
    max_connections: int = option(
        0,
        "Connections that are held at most; 0 is half of the files that the process may open, up to 8192",
        least=0,
    )
    worker_wait_s: float = option(
        15.0, "Seconds that a request waits for a worker when there is none", least=0
    )
    prefill_wait_s: float = option(30.0, "Seconds that a request waits for its remote prefill", least=0)
    migration_limit: int = option(
        3, "Times that a stream goes on at another worker when its own has died; 0: it is cut", least=0
    )
    record_traffic: str | None = option(
        None, "File that the lengths and times of every request are appended to", path=WRITTEN
    )
    allow_media_urls: bool = option(
        False, "Let engines fetch images and sounds from addresses that clients name, your network's too"
    )
    page: bool = option(True, "Have the web page at `/ui`, for a browser that `dynaplan ui` has let in")
    otlp_traces_endpoint: str = option(
        "",
        "Address of a collector of traces, by OTLP over HTTP; takes the extra `otel`",
    )
    access_log: bool = option(False, "Log a line for each request: id, model, worker, tokens, TTFT")
    endpoint: str | None = option(None, NO_EFFECT)
    endpoint_chat: str | None = option(None, NO_EFFECT)
    endpoint_completions: str | None = option(None, NO_EFFECT)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    model: str = ""
    shared_metrics: str | None = None
    promised_ms: tuple[float, float] | None = None


@dataclass(init=False, repr=False, eq=False)
class ProcessorSettings(Settings):
    """Options of the Processor's section alone; routing is in the Frontend's too."""

    prompt_template: str | None = option(None, NO_EFFECT)


@dataclass(init=False, repr=False, eq=False)
class RouterSettings(Settings):
    """Options of the Router's section alone; routing is in the Frontend's too."""

    indexer: str | None = option(None, NO_EFFECT)
