"""The charts of a running deployment: its samples over time, and the drawing of them on the clock's axis.

Samples are read out of the planner's log and of polls of the deployment. The log outlasts frontends and
pages, and has a sample for each of the planner's intervals. Polls have more, more often, for as long as a
page is open. Both are read as plain data, and what cannot be read is left out. The panels are those of
``simulate --html``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from html import escape
from typing import Any

from dynaplan.config.settings.planner import KV_USAGE_PER_WAITING_REQUEST
from dynaplan.lab.drawing.panels import ClockAxis, Lane, Panel, Series, draw, readable

SPANS_S = (900, 3600, 6 * 3600)
"""The times that can be shown, in seconds."""

WIDTHS = (380, 560, 780, 1000)
"""The widths that can be drawn, in px: from a phone's on."""

STEP_PX = 4
"""The px of one step of a line."""

DECODE, PREFILL = 0, 1
"""The colours of what decode workers do, and all workers together, and of prefill workers."""

KV_TITLE = f"KV cache, % (+{100 * KV_USAGE_PER_WAITING_REQUEST:g} a waiting request)"
"""Of decode workers. The usage may exceed 100 %: as the planner counts it, requests that wait add to it."""

MAX_MODELS = 8
"""The models that have a line of their own: those with the most requests."""

DAY_S = 86400

Lines = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class ChartsRequest:
    """The charts that a page shows: ``span_s`` seconds until now, ``width`` px wide."""

    span_s: int
    width: int

    @classmethod
    def of(cls, span_s: str, width: str) -> ChartsRequest:
        """Read what a page asks for: the known span and width that are nearest; raises ValueError."""
        return cls(_nearest(SPANS_S, int(span_s[:9])), _nearest(WIDTHS, int(width[:9])))

    @property
    def name(self) -> str:
        """The name of these charts among the events of a page."""
        return f"charts-{self.span_s}-{self.width}"


@dataclass(frozen=True)
class TimedChange:
    """A decision that changed something: when (seconds since the epoch), and what and why, in words."""

    at_s: float
    text: str


@dataclass(frozen=True)
class ChartLimits:
    """The limits that are drawn: the targets as ``status`` has them, empty without; the number of GPUs.

    ``kv_scale_up`` is the KV usage above which the planner adds a decode worker; None where it does not.
    ``is_by_model``: models are loaded on request, and each has a line of its own.
    """

    targets: Mapping[str, Any]
    gpus: int
    has_prefill: bool
    kv_scale_up: float | None = None
    is_by_model: bool = False


def live_svg(
    asked: ChartsRequest,
    samples: Sequence[DeploymentSample],
    changes: Sequence[TimedChange],
    limits: ChartLimits,
    now_s: float,
    offset_s: float,
) -> str:
    """Return the charts as one SVG document without a line break, the drawn numbers as JSON within.

    ``offset_s`` is what the time zone adds to the time since the epoch, in seconds.
    """
    steps = asked.width // STEP_PX
    step_s = asked.span_s / steps
    begin_s = now_s - asked.span_s
    lines = resample(samples, begin_s, step_s, steps)
    panels = _panels(lines, [index * step_s for index in range(steps)], limits)
    shown = [each for each in changes if begin_s <= each.at_s <= now_s]
    moments = [each.at_s - begin_s for each in shown]
    axis = ClockAxis(float(asked.span_s), asked.width, (begin_s + offset_s) % DAY_S)
    titles = [f"{axis.text(at_s)} {each.text}" for at_s, each in zip(moments, shown, strict=True)]
    drawing, height = draw(panels, [Lane(moments, titles)], axis)
    numbers = readable(panels, axis, ["", ""], [Lane(moments, [each.text for each in shown])])
    numbers["axis"] |= {"began_s": begin_s, "offset_s": offset_s}
    text = escape(json.dumps(numbers, separators=(",", ":")))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {asked.width} {height:g}" aria-hidden="true">'
        f"<metadata>{text}</metadata>{drawing}"
        '<path class="cursor" d=""/></svg>'
    ).replace("\n", " ")


def _panels(lines: Lines, at_s: Sequence[float], limits: ChartLimits) -> list[Panel]:
    """Return the panels; those of which nothing is known are left out."""
    targets = limits.targets

    def series(
        name: str, key: str, colour: int = DECODE, *, is_dashed: bool = False, times: int = 1
    ) -> Series:
        values = [None if value is None else value * times for value in lines[key]]
        return Series(name, at_s, values, colour, is_dashed)

    def latency(name: str) -> Panel:
        percentile = targets.get(f"{name}_percentile", 95)
        curves = [series(f"p{percentile:g}", f"{name}_high_ms")]
        curves.append(series("mean", f"{name}_ms", is_dashed=True))
        target_ms = targets.get(f"{name}_ms")
        return Panel(f"{name}_ms", f"{name.upper()}, ms", curves, target_ms, "target", is_adaptive=True)

    def of_models(name: str, key: str) -> list[Series]:
        models = _shown_models(lines) if limits.is_by_model else []
        return [series(model, f"{key} {model}", place) for place, model in enumerate(models)] or [
            series(name, key)
        ]

    workers = [series("decode", "decode"), series("decode wanted", "decode_wanted", is_dashed=True)]
    if limits.has_prefill:
        workers.append(series("prefill", "prefill", PREFILL))
        workers.append(series("prefill wanted", "prefill_wanted", PREFILL, is_dashed=True))
    if limits.is_by_model:
        workers = [series("of all models", "decode")]
    kv_limit = None if limits.kv_scale_up is None else 100 * limits.kv_scale_up
    at_engines = [series("running", "running"), series("waiting", "waiting", is_dashed=True)]
    every = [
        Panel("requests", "Requests per second", of_models("requests", REQUESTS)),
        Panel("tokens", "Tokens generated per second", of_models("tokens", TOKENS)),
        latency("ttft"),
        latency("itl"),
        Panel("decode", "Workers ready", workers, is_counted=True),
        Panel("gpus", "GPUs", [series("held", "gpus")], float(limits.gpus), "all", is_counted=True),
        Panel("busy", "GPUs held: busy, %", [series("busy", "gpus_busy", times=100)]),
        Panel("kv", KV_TITLE, [series("used", "kv_usage", times=100)], kv_limit, "add a worker"),
        Panel("service", "Requests at the engines", at_engines, is_adaptive=True),
    ]
    shown = [each for each in every if limits.gpus or each.key not in ("gpus", "busy")]
    return [replace(each, has_legend=True) for each in shown if each.key == "decode" or _is_known(each)]


def _shown_models(lines: Lines) -> list[str]:
    """Return the models with the most requests, by name."""
    sums = {
        key.removeprefix(f"{REQUESTS} "): sum(filter(None, values))
        for key, values in lines.items()
        if key.startswith(f"{REQUESTS} ")
    }
    most = sorted(sums, key=lambda model: -sums[model])[:MAX_MODELS]
    return sorted(model for model in most if sums[model])


def _is_known(panel: Panel) -> bool:
    return any(value is not None for each in panel.series for value in each.values)


def _nearest(known: Sequence[int], number: int) -> int:
    return min(known, key=lambda each: abs(each - number))


MAX_RECORD_S = 600.0
"""The longest time that one record of the planner's log is taken to speak for, in seconds."""

Document = Mapping[str, Any]


@dataclass(frozen=True)
class ModelRates:
    """The load of one of several models."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0

    def plus(self, other: ModelRates) -> ModelRates:
        return ModelRates(self.requests_per_s + other.requests_per_s, self.tokens_per_s + other.tokens_per_s)


@dataclass(frozen=True)
class DeploymentSample:
    """One deployment for the ``lasted_s`` seconds before ``at_s`` (since the epoch); None is "not known".

    Times are in ms, ``..._high_ms`` at the percentile that the targets name; workers are the ready ones.
    ``kv_usage`` and ``gpus_busy`` are parts of one, means over decode workers and over the GPUs held.
    """

    at_s: float
    lasted_s: float
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_ms: float | None = None
    ttft_high_ms: float | None = None
    itl_ms: float | None = None
    itl_high_ms: float | None = None
    decode: float | None = None
    decode_wanted: float | None = None
    prefill: float | None = None
    prefill_wanted: float | None = None
    gpus: float | None = None
    gpus_busy: float | None = None
    kv_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    by_model: Mapping[str, ModelRates] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, float]]:
        """Yield what is known, by name; of a model with its name behind: ``requests_per_s qwen``."""
        yield from ((name, value) for name in VALUES if (value := getattr(self, name)) is not None)
        for model, rates in self.by_model.items():
            yield f"{REQUESTS} {model}", rates.requests_per_s
            yield f"{TOKENS} {model}", rates.tokens_per_s


REQUESTS, TOKENS = "requests_per_s", "tokens_per_s"
"""The values that models have, too."""

VALUES = tuple(
    each.name for each in fields(DeploymentSample) if each.name not in ("at_s", "lasted_s", "by_model")
)
"""The names of the values of all workers together."""


def samples_of_log(records: Iterable[Document], began_s: float | None = None) -> Iterator[DeploymentSample]:
    """Yield a sample of each record of a ``decisions.jsonl``, oldest first, that has a time.

    A sample lasts since the record before, the first since ``began_s``, MAX_RECORD_S at most.
    """
    before_s = began_s
    for record in records:
        at_s = record_time_s(record)
        if at_s is None:
            continue
        lasted_s = MAX_RECORD_S if before_s is None else min(MAX_RECORD_S, max(0.0, at_s - before_s))
        before_s = at_s
        yield _of_record(record, at_s, lasted_s)


def record_time_s(record: Document) -> float | None:
    """Return the time of a record in seconds since the epoch; None when it has none."""
    try:
        return datetime.fromisoformat(record["wall_time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _of_record(record: Document, at_s: float, lasted_s: float) -> DeploymentSample:
    seen = _part(record, "observation")
    fleet, desired, load = (_part(seen, name) for name in ("fleet", "desired", "load"))
    traffic = _part(seen, "traffic")
    if interval_s := _number(traffic, "interval_s"):
        lasted_s = min(lasted_s, interval_s)
    requests, tokens = _number(traffic, "requests"), _number(traffic, "osl_tokens")
    rate = requests / interval_s if requests is not None and interval_s else None
    roles = {role: _part(fleet, role) for role in ("decode", "prefill")}
    return DeploymentSample(
        at_s,
        lasted_s,
        requests_per_s=rate,
        tokens_per_s=rate * tokens if rate is not None and tokens is not None else None,
        ttft_ms=_number(traffic, "ttft_ms"),
        itl_ms=_number(traffic, "itl_ms"),
        decode=_number(roles["decode"], "ready"),
        prefill=_number(roles["prefill"], "ready"),
        decode_wanted=_wanted(_number(desired, "num_decode_workers")),
        prefill_wanted=_wanted(_number(desired, "num_prefill_workers")),
        gpus=_held(roles.values()),
        kv_usage=_number(load, "kv_usage"),
        waiting=_number(load, "prefill_queue"),
    )


def _held(roles: Iterable[Document]) -> float | None:
    """Return the GPUs that workers hold: all but failed ones; None when the fleet is not known."""
    held = [
        (_number(role, "gpus") or 0.0)
        * sum(_number(role, state) or 0.0 for state in ("starting", "ready", "asleep", "backoff", "draining"))
        for role in roles
        if role
    ]
    return sum(held) if held else None


def sample_of_status(document: Document, at_s: float, lasted_s: float) -> DeploymentSample:
    """Return the sample of a document of ``status`` as ``StatusPoller.poll`` makes it."""
    load, desired = _part(document, "load"), _part(document, "desired")
    rows = [row for row in document.get("workers", ()) if row.get("role") in ("decode", "prefill")]
    gpus = [row for row in document.get("gpus", ()) if row.get("workers")]
    busy = [value for row in gpus if (value := _number(row, "utilisation")) is not None]
    decoders = [row for row in rows if row["role"] == "decode"]
    usage = [value for row in decoders if (value := _number(row, "kv_pressure")) is not None]
    return DeploymentSample(
        at_s,
        lasted_s,
        requests_per_s=_number(load, "requests_per_s"),
        tokens_per_s=_total(rows, "tokens_per_s"),
        ttft_ms=_number(load, "ttft_mean_ms"),
        ttft_high_ms=_number(load, "ttft_percentile_ms"),
        itl_ms=_number(load, "itl_mean_ms"),
        itl_high_ms=_number(load, "itl_percentile_ms"),
        decode=_ready(rows, "decode"),
        prefill=_ready(rows, "prefill"),
        decode_wanted=_wanted(_number(desired, "decode")),
        prefill_wanted=_wanted(_number(desired, "prefill")),
        gpus=float(len(gpus)) if document.get("gpus") else None,
        gpus_busy=_mean(busy),
        kv_usage=_mean(usage),
        running=_total(rows, "running"),
        waiting=_total(rows, "waiting"),
        by_model={
            model: ModelRates(float(rates["requests_per_s"]), float(rates["tokens_per_s"]))
            for model, row in document.get("on_request", {}).items()
            if (rates := row.get("load"))
        },
    )


def resample(
    samples: Sequence[DeploymentSample], begin_s: float, step_s: float, steps: int
) -> dict[str, list[float | None]]:
    """Return each name's values, one per step of ``step_s`` seconds from ``begin_s`` on; None for unknown.

    The value of a step is that of the last sample that covers the step and knows it.
    """
    lines: dict[str, list[float | None]] = {name: [None] * steps for name in VALUES}
    for sample in samples:
        first = max(0, int((sample.at_s - sample.lasted_s - begin_s) // step_s))
        last = min(steps - 1, int((sample.at_s - begin_s) // step_s))
        if last < 0 or first > steps - 1:
            continue
        for name, value in sample.values():
            line = lines.setdefault(name, [None] * steps)
            for step in range(first, last + 1):
                line[step] = value
    return lines


def _ready(rows: Iterable[Document], role: str) -> float:
    return float(sum(row["role"] == role and row.get("state") == "ready" for row in rows))


def _total(rows: Iterable[Document], name: str) -> float | None:
    known = [value for row in rows if (value := _number(row, name)) is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _wanted(count: float | None) -> float | None:
    """Return a desired count; -1 is "not set"."""
    return None if count is None or count < 0 else count


def _part(document: Document, name: str) -> Document:
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _number(document: Document, name: str) -> float | None:
    value = document.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) == float("inf"):
        return None
    return float(value)
