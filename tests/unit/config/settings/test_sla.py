"""The options of the SLA planner: the seeds' names and defaults."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.sla import SlaSettings, SlaTargets
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
