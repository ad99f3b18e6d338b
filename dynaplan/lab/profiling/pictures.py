"""Picture files of plots: SVG always, and PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from dynaplan.lab.drawing.plots import Plot, plot_svg

SIZE_INCHES = (8.0, 5.0)
"""Width and height of a PNG picture."""

DOTS_PER_INCH = 120
"""The resolution of a PNG picture."""


def draw(directory: Path, plots: Mapping[str, Plot]) -> list[Path]:
    """Write the plots; return the files. A plot's name is its path in the directory, without the suffix.

    Raises OSError when it cannot write.
    """
    has_matplotlib = find_spec("matplotlib") is not None
    written = []
    for name, plot in plots.items():
        path = directory / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plot_svg(plot), encoding="utf-8")
        written.append(path)
        if has_matplotlib:
            written.append(_draw_png(path.with_suffix(".png"), plot))
    return written


def _draw_png(path: Path, plot: Plot) -> Path:
    from matplotlib.figure import Figure  # an extra, half a second

    figure = Figure(figsize=SIZE_INCHES)
    axes = figure.add_subplot()
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    for curve in plot.curves:
        axes.plot(*zip(*curve.points, strict=True), "o-" if curve.is_joined else "o", label=curve.name)
    if plot.chosen:
        axes.plot(*plot.chosen, "o", label="chosen", markersize=14, fillstyle="none", color="black")
    if plot.limit:
        axes.axvline(plot.limit[0], color="red", linestyle="--", label=plot.limit[1])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
