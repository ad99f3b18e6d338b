"""The planner's options as flags of ``dynaplan planner``."""

from __future__ import annotations

import pytest

from dynaplan.cli.components.planner import command
from dynaplan.domain.settings.fields import options_of
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.options.stock import PLANNER


def settings(*arguments: str) -> PlannerSettings:
    return PlannerSettings.from_options(command.make_context("planner", list(arguments)).params)


def test_every_option_of_a_planner_section_is_a_flag() -> None:
    flags = {flag.lstrip("-") for parameter in command.params for flag in parameter.opts}
    assert flags - {"store"} == set(PLANNER) == set(options_of(PlannerSettings))


def test_backend_is_accepted_as_in_a_file() -> None:
    assert settings("--backend", "vllm").backend == "vllm"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-gpu-budget", "4"], "max_gpu_budget", 4),
        (["--no-operation"], "no_operation", True),
        (["--no-consolidation-guard"], "consolidation_guard", False),
        (["--router", "least_loaded"], "router", "least-loaded"),
    ],
)
def test_a_flag_is_read_as_the_type_of_its_option(arguments: list[str], field: str, value: object) -> None:
    assert getattr(settings(*arguments), field) == value


def test_the_help_of_an_option_tells_its_choices_its_default_and_what_has_no_meaning() -> None:
    helps = {option.name: option.help for option in PLANNER.values()}
    assert "load, sla, both  [default: load]" in helps["policy"]
    assert "as the graph says" in helps["decode-max-num-seqs"]
    assert "no meaning yet" in helps["environment"]
