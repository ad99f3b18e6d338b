"""The results of simulations as one HTML page, which loads no other file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

import dynaplan
from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.config.settings.worker import SimOptions
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.drawing.panels import WIDTH, Lane, Panel, Series, TimeAxis, draw, readable
from dynaplan.lab.drawing.svg import STYLE, colour_class
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.table import Columns, Row, columns_of, notes, rows
from dynaplan.simulation.outcome import Distribution, Slo, Window
from dynaplan.simulation.run import Result, ScaleEvent
from dynaplan.simulation.simulated_service import UNLIMITED_QUEUE

PERCENT = 95
"""The percentile of the latencies in a window that is drawn."""

Lines = list[Series]
"""The lines of one panel."""

Measure = Callable[[Window, float], float | None]
"""A value of a window, from the window and its length in seconds."""


def axis_of(results: Sequence[Result]) -> TimeAxis:
    """Return the time axis: until the last arrival, as GPU-hours are counted."""
    return TimeAxis(max([1.0, *(each.trace_s for each in results)]))


def panels_of(results: Sequence[Result], slo: Slo, gpus: int, *, is_disaggregated: bool) -> list[Panel]:
    """Return the panels: load, workers, GPUs, latencies and queues; latencies by the requests' arrival."""
    load, p95, workers = results[:1], f"p{PERCENT}, ms (dotted: target)", "workers (dashed: wanted)"
    tokens = {"prompts": _prompts, "answers": _answers}
    queue, service = _moments(results, "prefill_queue"), _moments(results, "in_service")
    return [
        Panel("requests", "Load: requests per second", _load(load, {"requests": _requests})),
        Panel("tokens", "Load: tokens per second, prompts and answers (dashed)", _load(load, tokens)),
        *([_workers("prefill", f"Prefill {workers}", results)] if is_disaggregated else []),
        _workers("decode", f"Decode {workers}" if is_disaggregated else workers.capitalize(), results),
        Panel("gpus", "GPUs held (dotted: budget)", _gpus(results), float(gpus), is_counted=True),
        _latency("ttft_ms", f"TTFT {p95}", results, slo.ttft_ms),
        _latency("itl_ms", f"ITL {p95}", results, slo.itl_ms),
        Panel("slo", "SLO met, %", _per_window(results, "", _met)),
        *([Panel("queue", "Prefill queue", queue, is_adaptive=True)] if is_disaggregated else []),
        Panel("service", "Requests in service", service, is_adaptive=True),
    ]


def lanes_of(results: Sequence[Result], axis: TimeAxis) -> list[Lane]:
    """Return the decisions of every policy, in words."""
    return [
        Lane(
            [each.at_s for each in result.events],
            [f"{result.policy}, {axis.text(each.at_s)}: {change_text(each)}" for each in result.events],
        )
        for result in results
    ]


def change_text(event: ScaleEvent) -> str:
    changes = [
        f"{name} {before} → {after}"
        for name, before, after in (
            ("prefill", event.before.prefill, event.after.prefill),
            ("decode", event.before.decode, event.after.decode),
        )
        if before != after
    ]
    return ", ".join(changes) + (f": {event.why}" if event.why else "")


def _load(results: Sequence[Result], measures: Mapping[str, Measure]) -> Lines:
    """Return the lines of the load, which is the same for every policy."""
    lines = [each for name, measure in measures.items() for each in _per_window(results, name, measure)]
    return [
        Series(each.name, each.at_s, each.values, is_dashed=bool(index)) for index, each in enumerate(lines)
    ]


def _requests(window: Window, width_s: float) -> float:
    return window.requests / width_s


def _prompts(window: Window, width_s: float) -> float:
    return window.prompt_tokens / width_s


def _answers(window: Window, width_s: float) -> float:
    return window.output_tokens / width_s


def _met(window: Window, _width_s: float) -> float | None:
    return 100 * window.both_met / window.requests if window.requests else None


def _latency(field: str, title: str, results: Sequence[Result], target_ms: float) -> Panel:
    def value(window: Window, _width_s: float) -> float | None:
        spread: Distribution = getattr(window, field)
        return spread.percentile(PERCENT) if spread.count else None

    return Panel(field, title, _per_window(results, "", value), target_ms, is_adaptive=True)


def _per_window(results: Sequence[Result], name: str, measure: Measure) -> Lines:
    lines = []
    for policy, result in enumerate(results):
        windows = result.outcome.windows
        values = [measure(window, windows.width_s) for window in windows]
        lines.append(Series(name, [index * windows.width_s for index in range(len(values))], values, policy))
    return lines


def _workers(role: str, title: str, results: Sequence[Result]) -> Panel:
    def lines() -> Iterator[Series]:
        for policy, result in enumerate(results):
            at_s = [each.at_s for each in result.fleet]
            serving = [float(getattr(each.serving, role)) for each in result.fleet]
            wanted = [float(getattr(each.wanted, role)) for each in result.fleet]
            yield Series("serving", at_s, serving, policy)
            yield Series("wanted", at_s, wanted, policy, is_dashed=True)

    return Panel(role, title, list(lines()), is_counted=True)


def _gpus(results: Sequence[Result]) -> Lines:
    return [
        Series("", [each.at_s for each in result.fleet], [each.gpus for each in result.fleet], policy)
        for policy, result in enumerate(results)
    ]


def _moments(results: Sequence[Result], field: str) -> Lines:
    """Return a line for each policy: a field of its snapshots, averaged over windows.

    Empty ones are left out.
    """
    lines = []
    for policy, result in enumerate(results):
        width_s = result.outcome.windows.width_s
        seen: dict[float, list[float]] = {}
        for each in result.moments:
            seen.setdefault(each.at_s // width_s * width_s, []).append(float(getattr(each, field)))
        lines.append(Series("", list(seen), [fmean(values) for values in seen.values()], policy))
    return lines


DIRECTORY = Path(dynaplan.__file__).parent / "data" / "page"
"""The folder with the page's template, style and script."""

HIGHER_IS_BETTER = frozenset({"slo", "ttft_slo", "itl_slo", "goodput_per_s", "hit_rate"})
"""The columns whose highest value is the best; of any other number the lowest is."""


def page(options: SimulateOptions, results: Sequence[Result], said: Sequence[str] = ()) -> str:
    """Return one HTML document that needs no other file: the options, the table, and what happened when.

    ``said`` are more sentences below the table. The same results make the same page.
    """
    table = rows(results)
    axis = axis_of(results)
    panels = panels_of(results, options.slo, options.gpus, is_disaggregated=options.is_disaggregated)
    lanes = lanes_of(results, axis)
    drawing, height = draw(panels, lanes, axis)
    policies = [each.policy for each in results]
    return Template(_file("page.html")).substitute(
        title=escape(f"{', '.join(policies)} on {options.trace}"),
        essentials="".join(
            f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>" for name, value in _essentials(options)
        ),
        table=_table(table, columns_of(table)),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in (*notes(results), *said)),
        switches="".join(_switch(index, each.policy) for index, each in enumerate(results)),
        drawing=drawing,
        width=WIDTH,
        height=f"{height:g}",
        end=f"{axis.end_s:g}",
        width_s=f"{max((each.outcome.windows.width_s for each in results), default=1.0):g}",
        decisions="".join(_decisions(index, each, axis) for index, each in enumerate(results)),
        version=dynaplan.__version__,
        style=STYLE + _file("page.css"),
        script=_file("charts.js") + _file("page.js"),
        data=_embedded({"rows": table, **readable(panels, axis, policies, list(map(_events, results)))}),
    )


def _file(name: str) -> str:
    return (DIRECTORY / name).read_text(encoding="utf-8")


def _essentials(options: SimulateOptions) -> Iterable[tuple[str, object]]:
    workers = "prefill and decode workers" if options.is_disaggregated else "aggregated workers"
    profile = SimOptions.from_options(options.engine).profile_name
    yield "Trace", options.trace + (f", {options.rate_scale:g} times" if options.rate_scale != 1 else "")
    yield "Profile", profile
    yield "GPUs", f"{options.gpus}, {workers}"
    yield "Start-up", f"{options.startup_time_s:g} s"
    yield "Targets", f"TTFT {options.slo.ttft_ms:g} ms, ITL {options.slo.itl_ms:g} ms"
    yield "Router", options.routing.in_words
    yield "Seed", options.seed
    engines = {"Engine": options.engine_of(Role.DECODE)}
    if options.is_disaggregated:
        yield "Local prefill", _local_prefill(options.disaggregation)
        if options.engine_of(Role.PREFILL) != options.engine:
            engines["Prefill engine"] = options.engine_of(Role.PREFILL)
    for name, given in {"Planner": options.planner, **engines}.items():
        texts = [f"{key}={value}" for key, value in given.items() if key != "profile"]
        if texts:
            yield name, ", ".join(texts)


def _local_prefill(settings: DisaggregationSettings) -> str:
    """Return in words the prompts that decode workers compute themselves."""
    texts = []
    if settings.max_queued < UNLIMITED_QUEUE:
        texts.append(f"with {settings.max_queued:g} prompts in the prefill queue")
    if settings.is_conditional:
        texts.append(f"of prompts up to {settings.max_local_tokens} tokens")
    return " or ".join(texts) or "never"


def _table(table: Sequence[Row], columns: Columns) -> str:
    heads = "".join(
        f'<th scope="col" title="{key}">{escape(head)}</th>' for key, (head, _) in columns.items()
    )
    best = {key: _best(key, shown, table) for key, (_, shown) in columns.items()}
    lines = []
    for index, row in enumerate(table):
        cells = [f'<th scope="row"><i class="swatch{colour_class(index)}"></i>{escape(row["policy"])}</th>']
        for key, (_, shown) in columns.items():
            text = shown.format(row[key])
            mark = ' class="best"' if text == best[key] else ""
            cells.append(f"<td{mark}>{escape(text)}</td>" if key != "policy" else "")
        lines.append(f'<tr data-policy="{index}">{"".join(cells)}</tr>')
    return f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _best(key: str, shown: str, table: Sequence[Row]) -> str | None:
    """Return the best value as it is shown; None when all are alike, or are no numbers."""
    values = [row[key] for row in table if isinstance(row[key], int | float)]
    if len({shown.format(each) for each in values}) < 2:
        return None
    return shown.format(max(values) if key in HIGHER_IS_BETTER else min(values))


def _switch(index: int, policy: str) -> str:
    return (
        f'<label><input type="checkbox" checked data-switch="{index}">'
        f'<i class="swatch{colour_class(index)}"></i>{escape(policy)}</label>'
    )


def _decisions(index: int, result: Result, axis: TimeAxis) -> str:
    lines = "".join(
        f"<tr><td>{axis.text(each.at_s)}</td><td>{each.before}</td><td>{each.after}</td><td>{escape(each.why)}</td></tr>"
        for each in result.events
    )
    head = "<tr><th>At</th><th>From</th><th>To</th><th>Why</th></tr>"
    return (
        f'<details data-policy="{index}"><summary><i class="swatch{colour_class(index)}"></i>'
        f"Decisions of {escape(result.policy)}: {len(result.events)}</summary>"
        f"<table><thead>{head}</thead><tbody>{lines}</tbody></table></details>"
    )


def _events(result: Result) -> Lane:
    """Return the decisions in words, without the policy and the time."""
    return Lane([each.at_s for each in result.events], [change_text(each) for each in result.events])


def _embedded(document: Mapping[str, Any]) -> str:
    """Return JSON that no HTML parser can take for a tag."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
