from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli.simulate import command
from dynaplan.graph.config import read_config
from dynaplan.lab.simulate.many_models import ManyModels, models_of, read_models, run_comparison
from dynaplan.util.errors import ConfigError

GB = 10**9


def test_models_are_read_with_names_and_load_times() -> None:
    models = read_models("20, e5=1@3,qwen=13.5")
    sizes = {name: model.settings.claim_bytes for name, model in models.items()}
    assert sizes == {"m1": 20 * GB, "e5": GB, "qwen": int(13.5 * GB)}
    assert [model.load_s for model in models.values()] == [20, 3, 13.5]


@pytest.mark.parametrize("text", ["", "big", "a=1,a=2", "a=0", "a=1@"])
def test_a_wrong_list_of_models_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--models(?s:.*)NAME=GB@SECONDS"):
        read_models(text)


def test_the_command_compares_our_rules_with_a_gpu_for_each_model(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--models", "20,13", "--gpus", "1", "--trace", "agents:duration=300", "--json", str(path)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    names = ["dynaplan", "own-gpu"]
    assert [line.split()[0] for line in result.output.splitlines()[1:3]] == names
    assert [row["policy"] for row in json.loads(path.read_text())] == names


def test_the_models_of_a_deployments_file_are_simulated_with_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "Common: {engine: sim}\n"
        "Models:\n"
        "  ant: {memory: 20GB, startup-time: 4, ttl: 1m, pin: true}\n"
        "  bee: {memory: 3GB, priority: 2}\n"
    )
    models = models_of(read_config(file, []), 24 * GB)
    assert [(each.settings.claim_bytes, each.load_s) for each in models.values()] == [
        (20 * GB, 4),
        (3 * GB, 3),
    ]
    assert (models["ant"].settings.ttl_s, models["ant"].settings.is_pinned) == (60, True)
    assert models["bee"].settings.priority == 2
    arguments = ["-f", str(file), "--gpus", "1", "--trace", "agents:duration=100"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.output.startswith("POLICY")


def test_a_model_of_unknown_size_says_where_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"Models.ant: how much memory(?s:.*)memory: 13GB"):
        models_of({"Models": {"ant": {"engine": "sim"}}}, 24 * GB)


def test_models_of_a_file_sleep_and_span_gpus_as_they_do_live(tmp_path: Path) -> None:
    file, trace, results = tmp_path / "models.yaml", tmp_path / "trace.csv", tmp_path / "results.json"
    rows = [f"2026-01-01 00:0{minute}:00,100,10,{'ab'[minute % 2]}" for minute in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens,Model", *rows]))

    def simulated(options: str) -> dict[str, Any]:
        entry = f"{{engine: sim, memory: 20GB, startup-time: 20, {options}}}"
        file.write_text(f"Models: {{a: {entry}, b: {entry}}}\n")
        arguments = ["-f", str(file), "--gpus", "2", "--trace", str(trace), "--json", str(results)]
        CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
        return {row["policy"]: row for row in json.loads(results.read_text())}

    beside, wide = simulated("ttl: 0"), simulated("ttl: 0, resources: {gpu: 2}")
    asleep = simulated("ttl: 0, resources: {gpu: 2}, enable-sleep-mode: true")
    loads = [each["dynaplan"]["loads"] for each in (beside, wide, asleep)]
    assert loads == [2, 6, 2]
    assert wide["dynaplan"]["wait_p50_s"] > 20 > 2 > asleep["dynaplan"]["wait_p50_s"]
    assert (beside["own-gpu"]["loads"], wide["own-gpu"]["loads"]) == (2, 2)
    assert wide["own-gpu"]["gpu_hours"] == pytest.approx(2 * beside["own-gpu"]["gpu_hours"])


def test_a_trace_with_a_model_column_is_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,Model\n"
        "2026-01-01 00:00:00,100,10,a\n"
        "2026-01-01 00:00:30,100,10,b\n"
    )
    outcomes = run_comparison(ManyModels(str(trace), read_models("a=20@5,b=20@5"), 1, 24 * GB))
    assert [each.requests for each in outcomes] == [2, 2]
    assert outcomes[0].wait_longest_s == pytest.approx(5.5)


@pytest.mark.parametrize("words", ["ModelSets: {together: [[a], [b]]}", "Common: {not-beside: [a]}"])
def test_models_that_may_not_be_loaded_at_once_are_not_though_memory_is_there(
    tmp_path: Path, words: str
) -> None:
    file, trace, results = tmp_path / "models.yaml", tmp_path / "trace.csv", tmp_path / "results.json"
    rows = [f"2026-01-01 00:0{minute}:00,100,10,{'ab'[minute % 2]}" for minute in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens,Model", *rows]))
    models = "Models: {a: {engine: sim, memory: 2GB}, b: {engine: sim, memory: 2GB, max-workers: 1}}"

    def loads(more: str) -> dict[str, int]:
        file.write_text(f"{models}\n{more}\n")
        arguments = ["-f", str(file), "--gpus", "1", "--trace", str(trace), "--json", str(results)]
        CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
        return {row["policy"]: row["loads"] for row in json.loads(results.read_text())}

    assert loads("")["dynaplan"] == 2
    assert loads(words)["dynaplan"] > 2
    assert loads(words)["own-gpu"] == 2


def test_a_load_that_is_none_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'poisson' is no file(?s:.*)popularity, groups, agents"):
        run_comparison(ManyModels("poisson", read_models("1"), 1, GB))
