from __future__ import annotations

import pytest

from dynaplan.config.settings.forecasting import ForecastSettings
from dynaplan.util.errors import ConfigError


def test_the_options_have_the_originals_names_and_defaults_except_for_the_predictor() -> None:
    assert ForecastSettings().to_options() == {
        "load-predictor": "auto",
        "load-predictor-log1p": False,
        "load-predictor-deadline": 10.0,
        "prophet-window-size": 50,
        "kalman-q-level": 1.0,
        "kalman-q-trend": 0.1,
        "kalman-r": 10.0,
        "kalman-min-points": 5,
    }


def test_options_are_read_in_either_case() -> None:
    settings = ForecastSettings.from_options(
        {"load_predictor": "kalman", "kalman-q-level": 2, "load-predictor-log1p": True, "kalman-r": None}
    )
    assert settings == ForecastSettings(
        load_predictor="kalman", kalman_q_level=2.0, load_predictor_log1p=True
    )
    assert ForecastSettings.from_options(settings.to_options()) == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load-predictor": "magic"}, "Planner.load-predictor is 'magic'\n.*constant, arima, kalman"),
        ({"kalman-r": 0}, "Planner.kalman-r is 0\n.*more than 0"),
        ({"kalman-q-levle": 1}, "no option 'kalman-q-levle'\n.*'kalman-q-level'"),
        ({"prophet-window-size": 1}, "Planner.prophet-window-size is 1\n.*2 or more"),
        ({"kalman-q-trend": "nan"}, "Planner.kalman-q-trend is 'nan'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_was_expected(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ForecastSettings.from_options(options)
