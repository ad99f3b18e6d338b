"""Options of forecasting the load, and the form of one forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaplan.config.settings.fields import READ, Settings, option

PREDICTORS = ("constant", "arima", "kalman", "prophet", "auto")
"""The values of ``load-predictor``. The first four are the original's."""

OUTSIDE_PREDICTORS = ("arima", "prophet")
"""The predictors that a library computes in a process of its own; the core computes the others."""

HISTORY_INTERVALS = 500
"""The number of newest intervals of a history that are used; older ones need not be kept."""


@dataclass(frozen=True)
class Forecast:
    """The expected value of one curve; never negative, never NaN.

    ``method`` is what computed it: with the predictor ``auto`` the one that was chosen, and the last value's
    (``constant``) where another one failed or is warming up; ``why`` says so. Not ``is_known`` means that
    nothing was ever measured: the value is 0 then and says nothing. ``typical_error`` is how far the method
    was off on average over the recent past, as many intervals ahead as now; 0 where it is not known.
    ``outcomes`` are what came beyond such forecasts, and what came, in each interval, the newest last.
    """

    value: float
    method: str
    why: str
    is_known: bool = True
    typical_error: float = 0.0
    outcomes: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class ForecastSettings(Settings):
    """Every option of forecasting, by the original's names.

    The variances of the Kalman filter are per interval, in the square of the curve's unit (of its logarithm
    with ``load_predictor_log1p``).
    """

    SECTION: ClassVar[str] = "Planner"

    load_predictor: str = option("auto", "How the load is forecast", choices=PREDICTORS)
    load_predictor_log1p: bool = option(False, "Forecast the logarithm of the load: for load that multiplies")
    load_predictor_warmup_trace: str | None = option(
        None, "A trace file that the history begins with", path=READ
    )
    load_predictor_deadline_s: float = option(
        10.0, "Seconds that arima and prophet may take; then the last value stands in", above=0
    )
    prophet_window_size: int = option(50, "Intervals that prophet looks back", least=2)
    kalman_q_level: float = option(1.0, "Variance by which the load's level moves in an interval", least=0)
    kalman_q_trend: float = option(0.1, "Variance by which the load's trend moves in an interval", least=0)
    kalman_r: float = option(10.0, "Variance of one measurement", above=0)
    kalman_min_points: int = option(5, "Measurements before which the last one is the forecast", least=1)
