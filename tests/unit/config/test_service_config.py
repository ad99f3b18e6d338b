"""What a service reads of the merged configuration."""

from __future__ import annotations

import pytest

from dynaplan.config.service_config import kebab_keys, section_options
from dynaplan.sdk import ServiceConfig
from dynaplan.util.errors import ConfigError

CONFIG = ServiceConfig(
    {
        "Common": {"model": "m", "block-size": 64, "kv-transfer-config": '{"a":1}', "unused": 1},
        "Worker": {
            "block-size": 32,
            "common-configs": ["model", "block-size", "absent"],
            "enforce-eager": True,
            "enable_prefix_caching": False,
            "remote-prefill": False,
            "rope": {"x": 1},
            "seed": None,
            "ServiceArgs": {"workers": 2},
        },
    }
)


def test_parsed_options_have_the_named_common_keys_unless_set_and_no_service_args() -> None:
    assert CONFIG.get_parsed_config("Worker") == {
        "model": "m",
        "block-size": 32,
        "enforce-eager": True,
        "enable_prefix_caching": False,
        "remote-prefill": False,
        "rope": {"x": 1},
        "seed": None,
    }
    assert CONFIG.get_parsed_config("Nobody") == {}


def test_both_spellings_name_one_common_key() -> None:
    config = ServiceConfig(
        {"Common": {"max_len": 1, "b-s": 2}, "W": {"common-configs": ["max-len", "b-s"], "b_s": 3}}
    )
    assert config.get_parsed_config("W") == {"max_len": 1, "b_s": 3}
    assert (
        kebab_keys(config.get_parsed_config("W")) == section_options(config, "W") == {"max-len": 1, "b-s": 3}
    )


def test_arguments_are_written_as_the_original_writes_them() -> None:
    assert CONFIG.as_args("Worker") == [
        "--model", "m", "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
        "--rope", '{"x": 1}',
    ]  # fmt: skip
    assert CONFIG.as_args("Nobody") == []


def test_a_prefix_selects_options_and_is_taken_off() -> None:
    config = ServiceConfig({"W": {"engine-seed": 1, "engine-eager": True, "other": 2}})
    assert config.as_args("W", prefix="engine-") == ["--seed", "1", "--eager"]


def test_a_required_option_that_is_missing_is_named() -> None:
    assert CONFIG.require("Worker", "model") == "m"
    with pytest.raises(ValueError, match=r"Worker\.endpoint must be specified in configuration"):
        CONFIG.require("Worker", "endpoint")


def test_the_environment_is_read_once_and_an_unset_one_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServiceConfig.get_instance() == {}
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", '{"A": {"x": 1}}')
    assert ServiceConfig.get_instance() == {}
    ServiceConfig.reset()
    assert ServiceConfig.get_instance() == {"A": {"x": 1}}


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}'])
def test_an_environment_that_is_no_configuration_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", text)
    with pytest.raises(ConfigError, match="DYNAMO_SERVICE_CONFIG"):
        ServiceConfig.get_instance()
