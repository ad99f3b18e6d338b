"""The flags of ``dynaplan worker`` and ``dynaplan frontend``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dynaplan.cli.component_commands import check_carried_out_here, frontend, planner, worker
from dynaplan.cli.service_options import FLAGS, ComponentCommand, Flags, known_flags
from dynaplan.config import stock
from dynaplan.config.service_config import CONFIG_VARIABLE
from dynaplan.config.settings.fields import NO_EFFECT, options_of
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.stock import PLANNER
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.errors import ConfigError


def flags_of(command: click.Command, *arguments: str) -> Flags:
    context = click.Context(command)
    command.parse_args(context, list(arguments))
    flags: Flags = context.meta[FLAGS]
    return flags


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--model", "llama", "--max-model-len=4096"], {"model": "llama", "max-model-len": 4096}),
        (["--max_num_seqs", "8"], {"max-num-seqs": 8}),
        (["--enable-prefix-caching"], {"enable-prefix-caching": True}),
        (["--no-enable-prefix-caching"], {"enable-prefix-caching": False}),
        (["--enable-prefix-caching=false"], {"enable-prefix-caching": False}),
        (["--model", "7"], {"model": "7"}),
        (["--seed", "3", "--namespace", "box", "--role", "prefill"], {"seed": 3}),
    ],
)
def test_every_option_of_a_workers_section_is_a_flag(arguments: list[str], known: dict[str, Any]) -> None:
    flags = flags_of(worker, *arguments)
    assert (flags.known, flags.others) == (known, {})


def test_what_no_section_knows_is_kept_apart_for_an_engine_that_may() -> None:
    flags = flags_of(worker, "--swap-spaces", "4", "--verbose-engine", "--seed", "1", "--scale=-2")
    assert flags.others == {"swap-spaces": 4, "verbose-engine": True, "scale": -2}
    assert flags.known == {"seed": 1}


@pytest.mark.parametrize(("typed", "meant"), [("max-model-lem", "max-model-len"), ("namespce", "namespace")])
def test_an_unknown_flag_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    context = click.Context(worker)
    worker.parse_args(context, [f"--{typed}", "4"])
    with pytest.raises(click.UsageError, match=rf"No such option '--{typed}'.*'--{meant}'"):
        known_flags(context)
    assert known_flags(worker.make_context("worker", ["--seed", "4"])) == {"seed": 4}


def test_the_originals_name_of_the_routing_mode_is_known() -> None:
    assert flags_of(frontend, "--router-mode", "kv").known == {"router": "kv"}


def test_overrides_of_a_section_are_no_flags() -> None:
    context = click.Context(worker)
    worker.parse_args(context, ["--VllmWorker.seed=4"])
    assert context.obj == ["--VllmWorker.seed=4"]
    assert context.meta[FLAGS] == Flags()


def test_the_help_page_lists_the_sections_options() -> None:
    text = worker.get_help(click.Context(worker))
    assert "--max-model-len" in text
    assert "--max-waiting-requests" in frontend.get_help(click.Context(frontend))
    assert {"engine", "model"} <= stock.WORKER.keys()


def settings(*arguments: str) -> PlannerSettings:
    return PlannerSettings.from_options(known_flags(planner.make_context("planner", list(arguments))))


@pytest.mark.parametrize("planner_options", [{}, {"environment": "local"}])
def test_orchestrate_is_refused_where_serve_carries_decisions_out(planner_options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"environment: local: `dynaplan serve` \(pid 5\) carries"
    ) as refused:
        check_carried_out_here(deployment(planner_options))
    assert "--Planner.environment=virtual" in str(refused.value)


@pytest.mark.parametrize("planner_options", [{"environment": "virtual"}, None])
def test_orchestrate_beside_a_planner_that_leaves_decisions_to_it_does_not_raise(
    planner_options: dict[str, Any] | None,
) -> None:
    check_carried_out_here(deployment(planner_options))


def deployment(planner_options: dict[str, Any] | None) -> Any:
    """A deployment with a planner of these options, or without one."""
    workers = [] if planner_options is None else [Worker("ns_Planner", "Planner", Role.PLANNER, since_s=0.0)]
    config = json.dumps({"Planner": planner_options or {}})
    return SimpleNamespace(
        namespace="ns",
        workers=workers,
        arbiter=SimpleNamespace(pid=5),
        document={"environment": {CONFIG_VARIABLE: config}},
    )


@pytest.mark.parametrize("command", [worker, frontend, planner])
def test_options_without_an_effect_are_taken_and_not_shown(command: click.Command) -> None:
    assert NO_EFFECT not in " ".join(CliRunner().invoke(command, ["--help"]).output.split())


def test_every_option_of_a_planner_section_is_a_flag() -> None:
    assert isinstance(planner, ComponentCommand)
    flags = {flag.removeprefix("--") for flag in planner.flags}
    assert flags - {"store"} == set(PLANNER) == set(options_of(PlannerSettings))


def test_a_misspelt_flag_is_answered_with_the_nearest_before_anything_is_looked_for() -> None:
    result = CliRunner().invoke(planner, ["--max-gpu-bugdet", "4"])
    assert (result.exit_code, "Did you mean '--max-gpu-budget'?" in result.output) == (2, True)


def test_an_override_of_another_section_is_refused() -> None:
    result = CliRunner().invoke(planner, ["--Frontend.port=1"])
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
    assert "load, sla, both, or MODULE:FUNCTION  [default: load]" in helps["policy"]
    assert "as the graph says" in helps["decode-max-num-seqs"]
    assert "virtual: a program of yours" in helps["environment"]
