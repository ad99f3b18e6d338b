"""The planner's options as flags of ``dynaplan planner``."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dynaplan.cli.components.flags import ComponentCommand, known_flags
from dynaplan.cli.components.planner import command
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.stock import PLANNER
from dynaplan.util.errors import ConfigError


def settings(*arguments: str) -> PlannerSettings:
    return PlannerSettings.from_options(known_flags(command.make_context("planner", list(arguments))))


def test_every_option_of_a_planner_section_is_a_flag() -> None:
    assert isinstance(command, ComponentCommand)
    flags = {flag.removeprefix("--") for flag in command.flags}
    assert flags - {"store"} == set(PLANNER) == set(options_of(PlannerSettings))


def test_a_misspelt_flag_is_answered_with_the_nearest_before_anything_is_looked_for() -> None:
    result = CliRunner().invoke(command, ["--max-gpu-bugdet", "4"])
    assert (result.exit_code, "Did you mean '--max-gpu-budget'?" in result.output) == (2, True)


def test_an_override_of_another_section_is_refused() -> None:
    result = CliRunner().invoke(command, ["--Frontend.port=1"])
    assert isinstance(result.exception, ConfigError)
    assert "Expected Planner" in str(result.exception)


def test_backend_is_accepted_as_in_a_file() -> None:
    assert settings("--backend", "vllm").backend == "vllm"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-gpu-budget", "4"], "max_gpu_budget", 4),
        (["--no-operation"], "no_operation", True),
        (["--no-operation=true", "--ttft=2e2"], "ttft_ms", 200.0),
        (["--no-consolidation-guard"], "consolidation_guard", False),
        (["--router", "least_loaded"], "router", "least-loaded"),
    ],
)
def test_a_flag_is_read_as_the_type_of_its_option(arguments: list[str], field: str, value: object) -> None:
    assert getattr(settings(*arguments), field) == value


def test_the_help_of_an_option_tells_its_choices_its_default_and_its_meaning() -> None:
    helps = {option.name: option.help for option in PLANNER.values()}
    assert "load, sla, both  [default: load]" in helps["policy"]
    assert "as the graph says" in helps["decode-max-num-seqs"]
    assert "virtual: a program of yours" in helps["environment"]
