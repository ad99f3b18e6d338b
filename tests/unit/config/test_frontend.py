"""The Frontend's settings: the sections that they come from, and the deadline of queued prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dynaplan.config.frontend import (
    PrefillDeadline,
    configured_deadline,
    disaggregation_settings_of,
    frontends_for,
    own_frontend_settings,
    prefill_deadline,
    promised_times,
    read_settings,
    routes_by_events,
)
from dynaplan.config.model_entries import served_models, with_worker_sections
from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig
from dynaplan.config.settings.frontend import DisaggregationSettings, FrontendSettings
from dynaplan.util.errors import ConfigError

ON = DisaggregationSettings(is_on=True)


@pytest.mark.parametrize(
    ("planner", "deadline"),
    [
        ({}, PrefillDeadline()),
        ({"ttft": 300}, PrefillDeadline()),
        ({"policy": "load", "ttft": 300}, PrefillDeadline()),
        ({"policy": "sla"}, PrefillDeadline(500.0, "Planner.ttft")),
        ({"policy": "both", "ttft": 300}, PrefillDeadline(300.0, "Planner.ttft")),
        ({"policy": "sla", "prefill_deadline": 0}, PrefillDeadline(0.0, "Planner.prefill-deadline")),
        ({"prefill-deadline": 700}, PrefillDeadline(700.0, "Planner.prefill-deadline")),
        ({"policy": "sla", "an option of tomorrow": 1}, PrefillDeadline(500.0, "Planner.ttft")),
    ],
)
def test_a_planner_that_plans_for_targets_says_the_deadline(
    planner: Mapping[str, Any], deadline: PrefillDeadline
) -> None:
    assert prefill_deadline(ON, planner) == deadline


@pytest.mark.parametrize("ms", [0.0, 800.0])
def test_what_a_frontend_is_told_comes_first_and_zero_is_off(ms: float) -> None:
    said = DisaggregationSettings(is_on=True, prefill_deadline_ms=ms)
    assert prefill_deadline(said, {"policy": "sla"}) == PrefillDeadline(ms, "prefill-deadline")


def test_without_prefill_workers_nothing_is_queued() -> None:
    assert prefill_deadline(DisaggregationSettings(), {"policy": "sla"}) == PrefillDeadline()


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="ttft"):
        prefill_deadline(ON, {"policy": "sla", "ttft": "soon"})


def test_it_is_told_in_words_with_its_origin() -> None:
    assert str(PrefillDeadline(500.0, "Planner.ttft")) == "by deadline, 500 ms (Planner.ttft)"
    assert str(PrefillDeadline(0.0, "prefill-deadline")) == "in the order of arrival"


def read(*sections: tuple[str, dict[str, Any]], **environment: str) -> FrontendSettings:
    return read_settings(sections, environment)


def test_the_defaults_are_the_originals() -> None:
    settings = read()
    assert (settings.host, settings.port, settings.router) == ("127.0.0.1", 8000, "round-robin")
    assert settings.disaggregation.max_local_tokens == 1000
    assert settings.disaggregation.max_queued == 2
    assert not settings.disaggregation.is_on


def test_keys_are_read_in_both_spellings_and_the_first_section_decides() -> None:
    settings = read(
        ("Frontend", {"served_model_name": "mine", "max-waiting-requests": 5}),
        ("VllmWorker", {"remote-prefill": True, "conditional_disagg": True, "max-waiting-requests": 9}),
    )
    assert (settings.model, settings.max_waiting_requests) == ("mine", 5)
    assert settings.disaggregation.is_on
    assert settings.disaggregation.is_conditional


def test_the_environment_says_where_to_listen_and_the_key() -> None:
    settings = read(DYNAMO_HOST="0.0.0.0", DYNAMO_PORT="9", DYNAPLAN_API_KEY="k")
    assert (settings.host, settings.port, settings.api_key) == ("0.0.0.0", 9, "k")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"router": "best"}, "round-robin, random, least-loaded"),
        ({"max-waiting-requests": 0}, "1 or more"),
        ({"max-waiting-requests": True}, "a whole number"),
        ({"worker-wait": "long"}, "a number"),
        ({"remote-prefill": "yes"}, "true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        read(("Frontend", options))
    assert next(iter(options)) in str(refused.value)


def test_a_whole_number_of_seconds_is_a_number() -> None:
    assert read(("Frontend", {"worker-wait": 3})).worker_wait_s == 3.0


def test_several_frontends_share_their_metrics() -> None:
    environment = {"DYNAPLAN_RUNTIME_DIR": "/run/x"}
    assert read_settings([], environment, frontends=1).shared_metrics is None
    assert read_settings([], environment, frontends=2).shared_metrics == "/run/x/frontend-metrics"


@pytest.mark.parametrize(("frontends", "waiting", "bodies_bytes"), [(1, 10, 900), (2, 5, 450), (4, 3, 300)])
def test_frontends_on_one_port_divide_the_limits_and_each_takes_one_body_at_least(
    frontends: int, waiting: int, bodies_bytes: int
) -> None:
    limits = {"max-waiting-requests": 10, "max-bodies-bytes": 900, "max-body-bytes": 300}
    settings = read_settings([("Frontend", limits)], {}, frontends)
    assert (settings.max_waiting_requests, settings.max_bodies_bytes) == (waiting, bodies_bytes)


def test_room_for_one_body_does_not_exceed_what_all_bodies_may_take() -> None:
    limits = {"max-bodies-bytes": 100, "max-body-bytes": 300}
    assert read_settings([("Frontend", limits)], {}, frontends=2).max_bodies_bytes == 100


@pytest.mark.parametrize(
    ("config", "own", "is_wanted"),
    [
        ({}, {}, False),
        ({"Frontend": {"router": "kv"}}, {}, True),
        ({"Router": {"router": "kv"}}, {}, True),
        ({"Router": {"router": "kv", "kv-events": False}}, {}, False),
        ({"Router": {"router": "round-robin"}}, {"router": "kv"}, False),
        ({}, {"router": "kv"}, True),
        ({}, {"router": "kv", "kv_events": False}, False),
    ],
)
def test_a_worker_tells_its_blocks_where_frontends_route_by_them(
    config: dict[str, Any], own: dict[str, Any], is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(config))
    ServiceConfig.reset()
    try:
        assert routes_by_events(own) is is_wanted
    finally:
        ServiceConfig.reset()


@pytest.mark.parametrize(
    ("worker", "frontend", "deadline_ms"),
    [
        ({"remote-prefill": True}, {}, 800.0),
        ({"remote-prefill": True, "prefill-deadline": 300}, {}, 300.0),
        ({"remote-prefill": True, "prefill-deadline": 300}, {"prefill_deadline": 0}, 0.0),
        ({}, {}, 0.0),
    ],
)
def test_a_frontend_dispatches_by_the_target_of_its_planner_unless_it_is_told(
    worker: dict[str, Any],
    frontend: dict[str, Any],
    deadline_ms: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {
        "Planner": {"policy": "sla", "common-configs": ["ttft"]},
        "Common": {"ttft": 800},
        "VllmWorker": worker,
        "Frontend": frontend,
    }
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(config))
    ServiceConfig.reset()
    caplog.set_level("INFO")
    try:
        settings = own_frontend_settings(ServiceConfig.get_instance().get_parsed_config("Frontend"))
        deadline = configured_deadline(config, ServiceConfig.get_instance().get_parsed_config("Planner"))
    finally:
        ServiceConfig.reset()
    assert settings.disaggregation.prefill_deadline_ms == deadline.ms == deadline_ms
    assert (f"queued prompts are computed {deadline}" in caplog.text) is bool(worker)


@pytest.mark.parametrize(
    ("gpus", "cores", "frontends"),
    [(0, 64, 1), (2, 64, 1), (3, 64, 2), (8, 64, 4), (16, None, 8), (8, 1, 1), (8, 2, 1), (8, 5, 2)],
)
def test_there_is_a_frontend_for_every_two_gpus_on_at_most_half_of_the_cores(
    gpus: int, cores: int | None, frontends: int
) -> None:
    assert frontends_for(gpus, cores) == frontends


def test_the_number_of_frontends_may_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"Frontend": {"max-waiting-requests": 10, "ServiceArgs": {"workers": "4"}}}
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(config))
    ServiceConfig.reset()
    try:
        settings = own_frontend_settings(ServiceConfig.get_instance().get_parsed_config("Frontend"))
    finally:
        ServiceConfig.reset()
    assert settings.max_waiting_requests == 3


def test_a_planner_that_plans_for_targets_promises_them_and_another_nothing() -> None:
    assert promised_times({"policy": "sla", "ttft": 300, "namespace": "n"}) == (300.0, 50.0)
    assert promised_times({"policy": "both", "ttft": 300, "itl": 20.5}) == (300.0, 20.5)
    assert promised_times({"ttft": 300}) is None
    assert promised_times({}) is None


def test_each_disaggregated_model_places_its_prompts_as_it_says_else_as_all_do() -> None:
    config = with_worker_sections(
        {
            "Common": {"engine": "sim"},
            "Frontend": {"conditional-disagg": True, "max-local-prefill-length": 300},
            "Models": {
                "ant": {"prefill": {}, "max-local-prefill-length": 20},
                "bee": {"prefill": {}},
            },
        }
    )
    ant, bee = (disaggregation_settings_of(each, config, {}) for each in served_models(config))
    assert (ant.is_on, ant.is_conditional, ant.max_local_tokens) == (True, True, 20)
    assert (bee.is_on, bee.max_local_tokens, bee.prefill_deadline_ms) == (True, 300, 0.0)
    planned = disaggregation_settings_of(served_models(config)[0], config, {"policy": "sla", "ttft": 250})
    assert planned.prefill_deadline_ms == 250
