"""The charts of a running deployment: the panels of ``simulate --html``, over the time of the clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dynaplan.lab.drawing.panels import ClockAxis, Lane, Panel, Series, draw, readable
from dynaplan.webui.samples import DeploymentSample, in_steps

SPANS_S = (900, 3600, 6 * 3600)
"""The times that can be shown, in seconds."""

WIDTHS = (380, 560, 780, 1000)
"""The widths that can be drawn, in px: from a phone's on."""

STEP_PX = 4
"""The px of one step of a line."""

DECODE, PREFILL = 0, 1
"""The colours of what decode workers do, and all workers together, and of prefill workers."""

DAY_S = 86400

Lines = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class ChartsAsked:
    """The charts that a page shows: ``span_s`` seconds until now, ``width`` px wide."""

    span_s: int
    width: int

    @classmethod
    def of(cls, span_s: str, width: str) -> ChartsAsked:
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
class ChartsLimits:
    """The limits that are drawn: the targets as ``status`` has them, empty without; the number of GPUs."""

    targets: Mapping[str, Any]
    gpus: int
    has_prefill: bool


def live_svg(
    asked: ChartsAsked,
    samples: Sequence[DeploymentSample],
    changes: Sequence[TimedChange],
    limits: ChartsLimits,
    now_s: float,
    offset_s: float,
) -> str:
    """Return the charts as one SVG document without a line break, the drawn numbers as JSON within.

    ``offset_s`` is what the time zone adds to the time since the epoch, in seconds.
    """
    steps = asked.width // STEP_PX
    step_s = asked.span_s / steps
    begin_s = now_s - asked.span_s
    lines = in_steps(samples, begin_s, step_s, steps)
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


def _panels(lines: Lines, at_s: Sequence[float], limits: ChartsLimits) -> list[Panel]:
    """Return the panels; those of which nothing is known are left out."""
    targets = limits.targets

    def series(
        name: str, key: str, colour: int = DECODE, *, is_dashed: bool = False, times: int = 1
    ) -> Series:
        values = [None if value is None else value * times for value in lines[key]]
        return Series(name, at_s, values, colour, is_dashed)

    def latency(name: str) -> Panel:
        percentile = targets.get(f"{name}_percentile", 95)
        title = f"{name.upper()}, ms: p{percentile:g}, mean dashed" + (", target dotted" if targets else "")
        curves = [series(f"p{percentile:g}", f"{name}_high_ms")]
        curves.append(series("mean", f"{name}_ms", is_dashed=True))
        return Panel(f"{name}_ms", title, curves, targets.get(f"{name}_ms"), is_adaptive=True)

    workers = [series("decode", "decode"), series("wanted", "decode_wanted", is_dashed=True)]
    if limits.has_prefill:
        workers.append(series("prefill", "prefill", PREFILL))
        workers.append(series("wanted", "prefill_wanted", PREFILL, is_dashed=True))
    at_engines = [series("running", "running"), series("waiting", "waiting", is_dashed=True)]
    every = [
        Panel("requests", "Requests per second", [series("requests", "requests_per_s")]),
        Panel("tokens", "Tokens generated per second", [series("tokens", "tokens_per_s")]),
        latency("ttft"),
        latency("itl"),
        Panel("decode", "Workers that are ready (dashed: wanted)", workers, is_counted=True),
        Panel(
            "gpus", "GPUs held (dotted: all)", [series("held", "gpus")], float(limits.gpus), is_counted=True
        ),
        Panel("busy", "GPUs held: busy, %", [series("busy", "gpus_busy", times=100)]),
        Panel("kv", "KV cache of decode workers, %", [series("used", "kv_usage", times=100)]),
        Panel("service", "Requests at the engines (dashed: waiting)", at_engines, is_adaptive=True),
    ]
    return [each for each in every if each.key == "decode" or _is_known(each)]


def _is_known(panel: Panel) -> bool:
    return any(value is not None for each in panel.series for value in each.values)


def _nearest(known: Sequence[int], number: int) -> int:
    return min(known, key=lambda each: abs(each - number))
