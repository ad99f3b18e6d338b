"""``dynaplan reload``: the difference is shown first, and half of a file is never applied."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli.scaling import reload
from dynaplan.fleet.launch import LAUNCH_FILE, RELOADED_FILE, Reload
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.util.errors import ConfigError, DeploymentError
from tests.unit.fleet.test_launch import LAUNCH

YAML = """
Common: {engine: sim, model: m}
Frontend: {api-key: secret}
VllmWorker:
  common-configs: [engine, model]
  max-num-seqs: 8
"""
GRAPH = GraphSpec(
    "graphs.agg:Frontend",
    str(Path(__file__).parents[4]),
    "ns",
    (
        ServiceSpec("Frontend", Role.FRONTEND),
        ServiceSpec("Processor", Role.SERVICE, in_process_of="Frontend"),
        ServiceSpec("VllmWorker", Role.DECODE, 1, 1),
        ServiceSpec("Planner", Role.PLANNER),
    ),
)


class Served:
    """A deployment that was served with a file, and the command typed beside it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "a.yaml"
        self.runtime_dir = directory
        self.applied: list[tuple[dict[str, str], list[str]]] = []
        self.write(YAML)
        found = SimpleNamespace(namespace="ns", runtime_dir=directory)
        monkeypatch.setattr(reload, "connect", lambda _: found)
        monkeypatch.chdir(directory)
        from dynaplan.cli.scaling import reloading

        monkeypatch.setattr(reloading, "Reloading", lambda *arguments: self)
        self.launch = replace(LAUNCH, graph=GRAPH, config_file=str(self.file), runtime_dir=directory)

    async def run(self, live: dict[str, str], services: list[ServiceSpec]) -> None:
        self.applied.append((live, [each.name for each in services]))

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def serve(self, **changed: Any) -> None:
        """Have what the file says now as the configuration of ``serve``."""
        launch = replace(self.launch, **changed)
        new = reload._read_again(replace(launch, config_file=str(self.file)), None, [])
        os.chdir(self.runtime_dir)
        (self.runtime_dir / LAUNCH_FILE).write_text(replace(launch, config=new.config).to_json())

    def typed(self, *arguments: str) -> Result:
        here = os.getcwd()
        try:
            return CliRunner().invoke(reload.command, list(arguments))
        finally:
            os.chdir(here)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served(tmp_path, monkeypatch)
    served.serve()
    return served


def test_an_unchanged_file_changes_nothing(served: Served) -> None:
    assert served.typed("-y").output == f"nothing has changed in {served.file}\n"
    assert served.applied == []


def test_the_difference_is_shown_with_what_it_takes_and_secrets_are_not(served: Served) -> None:
    served.write(YAML.replace("8", "16").replace("secret", "other") + "  max-prefill-queue-size: 5\n")
    shown = served.typed("--dry-run").output
    assert "VllmWorker.max-num-seqs            8    16   rolling restart of VllmWorker" in shown
    assert "VllmWorker.max-prefill-queue-size  -    5    live" in shown
    assert "Frontend.api-key                   ***  ***  rolling restart of Frontend" in shown
    assert served.applied == []
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": "5"}, ["VllmWorker", "Frontend"])]


def test_a_setting_that_is_gone_has_its_usual_value_again(served: Served) -> None:
    served.write(YAML + "  max-prefill-queue-size: 5\n")
    served.serve()
    served.write(YAML)
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": "2"}, [])]


@pytest.mark.parametrize(("deadline_ms", "queue", "length"), [(500, "1000000", "0"), (0, "2", "1000")])
def test_limits_of_remote_prefill_that_are_gone_are_the_usual_ones_of_the_order_in_which_prompts_go(
    served: Served, deadline_ms: int, queue: str, length: str
) -> None:
    ordered = YAML + f"  prefill-deadline: {deadline_ms}\n"
    served.write(ordered + "  max-prefill-queue-size: 5\n  max-local-prefill-length: 7\n")
    served.serve()
    served.write(ordered)
    served.typed("-y")
    assert served.applied == [({"max_prefill_queue_size": queue, "max_local_prefill_length": length}, [])]


TARGETS = YAML + "  remote-prefill: true\nPlanner: {policy: sla, profile-results-dir: h100-bf16}\n"


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (("max-num-seqs: 8", "max-num-seqs: 16"), "8  16  rolling restart of Planner, VllmWorker"),
        (
            ("  remote", "  router: kv\n  remote"),
            "-  kv  rolling restart of Frontend, Planner, VllmWorker",
        ),
        (("  remote", "  prefill-deadline: 0\n  remote"), "-  0  rolling restart of Frontend, Planner"),
        (("remote-prefill: true", "remote-prefill: false"), "rolling restart of Frontend, Planner"),
        (("  remote", "  swap-space: 4\n  remote"), "-  4  rolling restart of VllmWorker"),
        (("  remote", "  max-prefill-queue-size: 4\n  remote"), "-  4  live"),
    ],
)
def test_a_planner_for_targets_is_replaced_where_it_knows_the_setting_of_another_service(
    served: Served, change: tuple[str, str], row: str
) -> None:
    served.write(TARGETS)
    served.serve()
    served.write(TARGETS.replace(*change))
    shown = [" ".join(line.split()) for line in served.typed("--dry-run").output.splitlines()]
    assert any(line.endswith(" " + " ".join(row.split())) for line in shown), shown


def test_a_planner_by_thresholds_knows_nothing_of_the_sizes_of_others(served: Served) -> None:
    served.write(YAML.replace("8", "16"))
    assert "rolling restart of VllmWorker\n" in served.typed("--dry-run").output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("  max-num-seq: 9\n", "VllmWorker.max-num-seq: unknown option"),
        ("  max-prefill-queue-size: many\n", "max-prefill-queue-size"),
        ("  : [\n", "a.yaml"),
        ("  ServiceArgs: {resources: {gpu: 2}}\n", "only a new serve changes that; nothing is changed"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_key_and_nothing_changes(
    served: Served, change: str, said: str
) -> None:
    served.write(YAML + change)
    refusal = served.typed("-y").exception
    assert isinstance(refusal, ConfigError)
    assert said in str(refusal)
    assert served.applied == []


def test_nobody_is_asked_where_nobody_can_answer(served: Served) -> None:
    served.write(YAML.replace("8", "16"))
    refusal = served.typed().exception
    assert isinstance(refusal, ConfigError)
    assert refusal.hint == "Add -y."


def test_a_setting_of_the_command_line_is_one_of_the_file_from_now_on(served: Served) -> None:
    shown = served.typed("--dry-run", "--VllmWorker.max-num-seqs=32").output
    assert "VllmWorker.max-num-seqs  8    32" in shown


def test_a_deployment_without_a_file_must_be_given_one(served: Served) -> None:
    served.serve(config_file="")
    refusal = served.typed("-y").exception
    assert isinstance(refusal, ConfigError)
    assert "dynaplan reload -f FILE" in refusal.hint
    assert "nothing has changed" in served.typed("-y", "-f", "a.yaml").output


def test_what_a_killed_reload_has_left_undone_is_still_a_difference(served: Served) -> None:
    before = reload._read_again(served.launch, None, []).config
    served.write(YAML.replace("8", "16"))
    after = reload._read_again(served.launch, None, [])
    (served.runtime_dir / RELOADED_FILE).write_text(replace(after, before=before).to_json())
    shown = served.typed("--dry-run").output
    assert "did not come to its end" in shown
    assert "VllmWorker.max-num-seqs  8    16" in shown
    (served.runtime_dir / RELOADED_FILE).write_text(Reload(after.config, after.config_file).to_json())
    assert "nothing has changed" in served.typed("--dry-run").output


def test_a_launch_that_cannot_be_read_is_said(served: Served) -> None:
    (served.runtime_dir / LAUNCH_FILE).write_text("{}")
    refusal = served.typed("-y").exception
    assert isinstance(refusal, DeploymentError)
