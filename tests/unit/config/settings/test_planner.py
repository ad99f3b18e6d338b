"""The options' names, defaults and checks."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.util.errors import ConfigError

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
        "load-predictor": "auto",
        "load-predictor-deadline": 10.0,
        "ttft-percentile": 95.0,
        "itl-percentile": 95.0,
        "slo-window": 3600.0,
        "scale-down-headroom": 0.15,
        "learnt-floor": False,
        "hedge": True,
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
