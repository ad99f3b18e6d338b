"""What the Frontend is told: its options, gathered from the sections that the original spreads them over."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dynaplan.core.routing.choosing import MODES
from dynaplan.core.routing.disaggregation import DisaggregationSettings
from dynaplan.domain.errors import ConfigError

T = TypeVar("T", str, int, float, bool)


@dataclass(frozen=True)
class FrontendSettings:
    """Options of the Frontend, defaults filled in.

    ``model`` is the name clients must use; empty means: whatever the workers say. ``max_waiting_requests``
    bounds the requests that have not begun to answer. ``worker_wait_s`` is how long such a request waits
    for a worker when there is none. ``shared_metrics`` is the directory where several frontends add up
    their metrics, or None for one frontend. ``record_traffic`` is the file that every request is written to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model: str = ""
    router: str = "round-robin"
    overlap_weight: float = 1.0
    max_waiting_requests: int = 1024
    max_body_bytes: int = 16 * 1024 * 1024
    worker_wait_s: float = 15.0
    prefill_wait_s: float = 30.0
    api_key: str = ""
    decode_component: str = "VllmWorker"
    prefill_component: str = "PrefillWorker"
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    shared_metrics: Path | None = None
    record_traffic: Path | None = None


class Options:
    """Several sections of a configuration, read as one: the first that has a key decides; kebab or snake."""

    def __init__(self, sections: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._found: dict[str, tuple[str, Any]] = {}
        for name, section in reversed(sections):
            for key, value in section.items():
                if value is not None:
                    self._found[key.replace("_", "-")] = (f"{name}.{key}", value)

    def get(self, key: str, default: T, lowest: float | None = None) -> T:
        """The option, of its default's type; raises ConfigError for another one, or a value too low."""
        where, value = self._found.get(key, ("", default))
        kind = type(default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{where} is {value!r}", hint=f"expected: {_KINDS[kind]}")
        if lowest is not None and isinstance(value, int | float) and value < lowest:
            raise ConfigError(f"{where} is {value!r}", hint=f"expected: at least {lowest:g}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """The option as text, whatever the YAML made of it (a model may be called ``8``)."""
        return str(self._found.get(key, ("", default))[1])


def read_settings(
    sections: Sequence[tuple[str, Mapping[str, Any]]], environment: Mapping[str, str], frontends: int = 1
) -> FrontendSettings:
    """The settings from these sections, the first the strongest, and the environment."""
    options = Options(sections)
    return FrontendSettings(
        host=environment.get("DYNAMO_HOST") or options.text("host", "127.0.0.1"),
        port=int(environment.get("DYNAMO_PORT") or options.get("port", 8000, lowest=0)),
        model=options.text("served-model-name") or options.text("model"),
        router=_router(options),
        overlap_weight=options.get("kv-overlap-score-weight", 1.0, lowest=0),
        max_waiting_requests=options.get("max-waiting-requests", 1024, lowest=1),
        max_body_bytes=options.get("max-body-bytes", 16 * 1024 * 1024, lowest=1),
        worker_wait_s=options.get("worker-wait", 15.0, lowest=0),
        prefill_wait_s=options.get("prefill-wait", 30.0, lowest=0),
        api_key=environment.get("DYNAPLAN_API_KEY") or options.text("api-key"),
        decode_component=options.text("decode-component", "VllmWorker"),
        prefill_component=options.text("prefill-component", "PrefillWorker"),
        disaggregation=DisaggregationSettings(
            is_on=options.get("remote-prefill", False),
            is_conditional=options.get("conditional-disagg", False),
            max_local_prefill_length_tokens=options.get("max-local-prefill-length", 1000, lowest=0),
            max_prefill_queue_size=options.get("max-prefill-queue-size", 2, lowest=0),
        ),
        shared_metrics=_shared_metrics(environment) if frontends > 1 else None,
        record_traffic=Path(file) if (file := options.text("record-traffic")) else None,
    )


def gathered_settings(own: Mapping[str, Any]) -> FrontendSettings:
    """The settings of this process: its own section first, then those of Router, Processor and the worker."""
    from dynaplan.options.service_config import ServiceConfig

    config = ServiceConfig.get_instance()
    others = ("Router", "Processor", "VllmWorker")
    sections = [("Frontend", own), *((name, config.get_parsed_config(name)) for name in others)]
    common = config.get("Common") or {}
    sections.append(
        ("Common", {key: value for key, value in common.items() if key in ("model", "served-model-name")})
    )
    frontends = ((config.get("Frontend") or {}).get("ServiceArgs") or {}).get("workers") or 1
    return read_settings(sections, os.environ, frontends)


def _router(options: Options) -> str:
    mode = options.text("router", "round-robin").replace("_", "-")
    if mode not in MODES:
        raise ConfigError(f"router is {mode!r}", hint=f"expected one of: {', '.join(MODES)}")
    return mode


def _shared_metrics(environment: Mapping[str, str]) -> Path | None:
    runtime_dir = environment.get("DYNAPLAN_RUNTIME_DIR")
    return Path(runtime_dir) / "frontend-metrics" if runtime_dir else None


_KINDS: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
