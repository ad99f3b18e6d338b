"""The options' names, defaults and checks."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.planner import ForecastSettings, PlannerSettings, SlaSettings, SlaTargets
from dynaplan.util.errors import ConfigError


def test_the_names_and_defaults_are_the_originals() -> None:
    options = SlaSettings().to_options()
    original = {
        "ttft": 500.0,
        "itl": 50.0,
        "profile-results-dir": "profiling_results",
        "no-correction": False,
    }
    assert original.items() <= options.items()
    assert {"isl", "osl", "ttft-percentile", "itl-percentile", "sizing"} <= options.keys()


def test_options_are_read_in_kebab_and_snake_case() -> None:
    settings = SlaSettings.from_options(
        {"ttft": 200, "itl": 20, "no_correction": True, "ttft-percentile": 99, "isl": None}
    )
    assert settings.targets() == SlaTargets(200.0, 20.0, 99.0, 95.0)
    assert settings.no_correction
    assert SlaSettings.from_options(settings.to_options()) == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttft": 0}, "ttft is 0"),
        ({"itl": "fast"}, "itl is 'fast'"),
        ({"ttft-percentile": 100}, "Expected a number, more than 0, less than 100."),
        ({"sizing": "guess"}, "queueing, formula"),
        ({"tttf": 5}, "Did you mean 'ttft'"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SlaSettings.from_options(options)
    assert message in str(refusal.value)


def test_the_options_have_the_originals_names_and_defaults_except_for_the_predictor() -> None:
    assert ForecastSettings().to_options() == {
        "load-predictor": "kalman",
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


DOCUMENTED = {
    "namespace": "dynamo",
    "environment": "local",
    "no-operation": False,
    "adjustment-interval": 30,
    "metric-pulling-interval": 1,
    "max-gpu-budget": 8,
    "min-gpu-budget": 1,
    "decode-kv-scale-up-threshold": 0.9,
    "decode-kv-scale-down-threshold": 0.5,
    "prefill-queue-scale-up-threshold": 0.5,
    "prefill-queue-scale-down-threshold": 0.2,
    "decode-engine-num-gpu": 1,
    "prefill-engine-num-gpu": 1,
    "ttft": 500.0,
    "itl": 50.0,
    "isl": 3000,
    "osl": 500,
    "profile-results-dir": "profiling_results",
    "no-correction": False,
    "load-predictor-log1p": False,
    "prophet-window-size": 50,
    "kalman-q-level": 1.0,
    "kalman-q-trend": 0.1,
    "kalman-r": 10.0,
    "kalman-min-points": 5,
    "metric-reporting-prometheus-port": 0,
}


def test_the_defaults_are_documented_ones():
    own = {
        "consolidation-guard": True,
        "scaling-timeout": 1800.0,
        "decode-component": "VllmWorker",
        "prefill-component": "PrefillWorker",
        "policy": "load",
        "sizing": "queueing",
        "adjust-knobs": False,
        "max-running-requests": "off",
        "max-local-prefill-length": "off",
        "load-predictor": "kalman",
        "load-predictor-deadline": 10.0,
        "ttft-percentile": 95.0,
        "itl-percentile": 95.0,
        "slo-window": 3600.0,
        "metric-reporting-prometheus-host": "127.0.0.1",
        "nats-max-reconnects": -1,
    }
    assert PlannerSettings().to_options() == DOCUMENTED | own
    assert PlannerSettings().log_dir is None


def test_options_read_back():
    settings = PlannerSettings.from_options(
        {"min-endpoint": 2, "log-dir": "log/planner", "no_operation": True}
    )
    assert PlannerSettings.from_options(settings.to_options()) == settings


@pytest.mark.parametrize("key", ["adjustment-interval", "adjustment_interval"])
def test_keys_come_in_kebab_and_snake_case(key):
    assert PlannerSettings.from_options({key: 10}).adjustment_interval_s == 10


def test_none_is_not_set():
    assert PlannerSettings.from_options({"log-dir": None, "max-gpu-budget": None}) == PlannerSettings()


def test_virtual_is_an_environment():
    assert PlannerSettings.from_options({"environment": "virtual"}).environment == "virtual"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max-gpu-bugdet": 4}, "Did you mean 'max-gpu-budget'"),
        (
            {"max-gpu-budget": "many"},
            "Planner.max-gpu-budget is 'many'\n  Expected a whole number, 1 or more",
        ),
        ({"max-gpu-budget": 0}, "Expected a whole number, 1 or more"),
        ({"max-gpu-budget": 1.5}, "Expected a whole number"),
        ({"max-gpu-budget": True}, "Expected a whole number"),
        ({"no-operation": "maybe"}, "Expected true or false"),
        ({"adjustment-interval": 0}, "Expected a number, more than 0"),
        ({"adjustment-interval": float("nan")}, "Expected a number"),
        ({"namespace": ""}, "Expected text"),
        ({"environment": "moon"}, "Invalid environment: moon"),
        ({"decode-kv-scale-down-threshold": 0.9}, "to be less than decode-kv-scale-up-threshold"),
        ({"prefill-queue-scale-up-threshold": 0.1}, "to be less than prefill-queue-scale-up-threshold"),
        ({"min-gpu-budget": 9}, "to be no more than max-gpu-budget"),
        ({"adjustment-interval": 0.5}, "metric-pulling-interval to be no more than adjustment-interval"),
        ({"min-gpu-budget": 2, "min-endpoint": 2}, "Expected one of the two"),
        ({"slo-window": -1}, "Planner.slo-window is -1\n  Expected a number, 0 or more"),
    ],
)
def test_what_is_wrong_is_named_with_key_value_and_what_was_expected(options, message):
    with pytest.raises(ConfigError) as caught:
        PlannerSettings.from_options(options)
    assert message in str(caught.value)
