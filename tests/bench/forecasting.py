"""How good each predictor is and what it costs.

``python -m tests.bench.forecasting [--trace FILE ...] [--outside arima]``. Errors are in per cent of the
mean load: the mean absolute error, and one in which too low costs three times as much as too high. Each
predictor forecasts every interval of a curve after the first ten, knowing only what came before.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from dynaplan.config.settings.planner import HISTORY_INTERVALS, ForecastSettings
from dynaplan.planner.forecasting.forecaster import forecast
from dynaplan.planner.forecasting.library_forecaster import LibraryForecaster
from dynaplan.planner.forecasting.series import Series, clean_history
from dynaplan.planner.forecasting.traffic_history import interval_history
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.simulation.traces.synthetic import synthetic

STEPS = (1, 3, 6)
WARM_UP = 10
SEEDS = (1, 2, 3)
TRACE_INTERVALS_S = (10, 30, 60)
MADE_UP: Mapping[str, tuple[str, int]] = {
    "sinusoid 150 s": ("sinusoid:low=5,high=20,period=150,duration=600", 10),
    "sinusoid 30 min": ("sinusoid:low=5,high=20,period=1800,duration=9000", 30),
    "ramp": ("ramp:low=2,high=20,duration=1800", 30),
    "step": ("step:low=4,high=12,at=900,duration=1800", 30),
    "on/off": ("onoff:low=0.5,high=10,on=150,off=150,duration=2400", 10),
    "poisson": ("poisson:rate=10,duration=3600", 30),
    "constant 5 %": ("constant:rate=10,noise=0.05,every=30,duration=3600", 30),
}
PREDICTORS = ("constant", "kalman")

UNDER_WEIGHT = 3.0
"""Cost of a forecast that is too low, over that of one that is as much too high."""


def curves(traces: Sequence[Path]) -> Iterator[tuple[str, list[Series]]]:
    """Name, and the curve for each seed."""
    for path in traces:
        requests = list(read_trace(path))
        for interval_s in TRACE_INTERVALS_S:
            history = interval_history(requests, interval_s)
            yield f"{path.stem}, {interval_s} s", [[float(each.requests) for each in history]]
            yield f"{path.stem} ISL, {interval_s} s", [[each.isl_tokens for each in history]]
            yield f"{path.stem} OSL, {interval_s} s", [[each.osl_tokens for each in history]]
    for name, (text, interval_s) in MADE_UP.items():
        histories = [interval_history(synthetic(f"{text},seed={seed}"), interval_s) for seed in SEEDS]
        yield name, [[float(each.requests) for each in history] for history in histories]


def forecasts(predictor: str, series: Series, steps: int) -> Sequence[float]:
    """What the predictor would have said at each interval."""
    if predictor in PREDICTORS:
        settings = ForecastSettings(load_predictor=predictor)
        return [forecast(series[: end + 1], steps, settings).value for end in range(len(series))]
    return asyncio.run(_outside(predictor, series, steps))


async def _outside(method: str, series: Series, steps: int) -> list[float]:
    settings = ForecastSettings(load_predictor=method, load_predictor_deadline_s=600)
    forecaster = LibraryForecaster(settings, 30)
    try:
        return [(await forecaster.forecast(series[: end + 1], steps)).value for end in range(len(series))]
    finally:
        await forecaster.close()


def errors(predictor: str, of_seeds: Sequence[Series], steps: int) -> tuple[float, float]:
    """Mean absolute error and loss, in per cent of the mean load."""
    found = []
    for raw in of_seeds:
        series = clean_history(raw, HISTORY_INTERVALS)
        told = forecasts(predictor, series, steps)[WARM_UP:]
        pairs = [(v, f) for f, v in zip(told, series[WARM_UP + steps :], strict=False) if v is not None]
        load = sum(actual for actual, _ in pairs)
        missing = sum(max(0.0, actual - expected) for actual, expected in pairs)
        excess = sum(max(0.0, expected - actual) for actual, expected in pairs)
        found.append((100 * (missing + excess) / load, 100 * (UNDER_WEIGHT * missing + excess) / load))
    return mean(each[0] for each in found), mean(each[1] for each in found)


def table(predictors: Sequence[str], of_curves: Mapping[str, list[Series]], steps: int) -> Iterator[str]:
    """The lines of one table, with the means over all curves at its end."""
    intervals = "1 interval" if steps == 1 else f"{steps} intervals"
    yield f"\n### {intervals} ahead: mean absolute error / weighted loss, % of the mean load\n"
    yield f"| curve | {' | '.join(predictors)} |"
    yield f"|---|{'--:|' * len(predictors)}"
    every: list[list[tuple[float, float]]] = []
    for name, of_seeds in of_curves.items():
        row = [errors(predictor, of_seeds, steps) for predictor in predictors]
        every.append(row)
        yield f"| {name} | {' | '.join(map(_figure, row))} |"
    means = [
        (mean(error for error, _ in column), mean(loss for _, loss in column))
        for column in zip(*every, strict=True)
    ]
    yield f"| **mean** | {' | '.join(map(_figure, means))} |"


def _figure(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1f} / {pair[1]:.1f}"


def costs() -> Iterator[str]:
    """What one forecast costs, in ms of processor time: the best of several."""
    yield "\n### Cost of one forecast\n\n| predictor | 50 intervals | 500 intervals |\n|---|--:|--:|"
    history = [100.0 + index % 7 for index in range(500)]
    for predictor in PREDICTORS:
        settings = ForecastSettings(load_predictor=predictor)
        yield f"| {predictor} | {' | '.join(_best_ms(history[:size], settings) for size in (50, 500))} |"


def _best_ms(history: list[float], settings: ForecastSettings) -> str:
    taken_s = []
    for _ in range(20):
        began_s = time.process_time()
        forecast(history, 3, settings)
        taken_s.append(time.process_time() - began_s)
    return f"{1000 * min(taken_s):.2f} ms"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.forecasting", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace file, repeatable")
    parser.add_argument("--outside", action="append", default=[], choices=["arima", "prophet"])
    arguments = parser.parse_args()
    of_curves = dict(curves(arguments.trace))
    for steps in STEPS:
        for line in table([*PREDICTORS, *arguments.outside], of_curves, steps):
            print(line, flush=True)
    for line in costs():
        print(line)


if __name__ == "__main__":
    main()
