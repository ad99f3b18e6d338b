"""What each changed setting takes, while the deployment runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaplan.fleet.rules.reloading import ApplyMode, ReloadRules, SettingChange, restarted, setting_changes
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import ServiceSpec
from tests.unit.fleet.rules.graphs import decode, graph, prefill

FRONTEND, PLANNER = ServiceSpec("Frontend", Role.FRONTEND), ServiceSpec("Planner", Role.PLANNER)
PROCESSOR = ServiceSpec("Processor", Role.SERVICE, in_process_of="Frontend")
OWN = ServiceSpec("Middle", Role.SERVICE)
AGG, DISAGG = graph(FRONTEND, PROCESSOR, decode(), PLANNER, OWN), graph(FRONTEND, decode(), prefill())
RULES = ReloadRules(
    live_keys={"max-prefill-queue-size"},
    frontend_keys={"max-prefill-queue-size", "remote-prefill"},
    frontend_and_decode_keys={"router"},
    must_match_keys={"engine", "model"},
    gpus={"VllmWorker": 2},
)


def change(
    service: str, key: str, value: Any = 2, spec: Any = AGG, rules: ReloadRules = RULES
) -> SettingChange:
    (found,) = setting_changes(spec, {service: {key: 1}}, {service: {key: value}}, rules)
    return found


@pytest.mark.parametrize(
    ("service", "key", "words"),
    [
        ("VllmWorker", "max-num-seqs", "rolling restart of VllmWorker"),
        ("VllmWorker", "engine", "rolling restart of VllmWorker"),
        ("VllmWorker", "router", "rolling restart of Frontend, VllmWorker"),
        ("VllmWorker", "remote-prefill", "rolling restart of Frontend"),
        ("VllmWorker", "max-prefill-queue-size", "live"),
        ("Processor", "max-prefill-queue-size", "live"),
        ("Processor", "router", "rolling restart of Frontend"),
        ("Planner", "adjustment-interval", "rolling restart of Planner"),
        ("Middle", "anything", "rolling restart of Middle"),
        ("VllmWorker", "ServiceArgs.workers", "nothing: it is the number at the start"),
        ("Frontend", "ServiceArgs.workers", "needs a restart of serve, because serve starts that many"),
        ("VllmWorker", "ServiceArgs.resources.gpu", "needs a restart of serve, because serve divides"),
        (
            "VllmWorker",
            "tensor-parallel-size",
            "needs a restart of serve, because a worker would take 2 GPUs",
        ),
        ("Frontend", "port", "needs a restart of serve, because serve holds the public port"),
    ],
)
def test_a_change_takes_what_its_readers_need(service: str, key: str, words: str) -> None:
    assert change(service, key).apply_text.startswith(words)


def test_what_both_sides_of_a_hand_off_must_agree_on_needs_a_new_serve() -> None:
    assert change("VllmWorker", "model", spec=DISAGG).apply_mode is ApplyMode.RESTART_SERVE
    assert change("PrefillWorker", "max-num-seqs", spec=DISAGG).restarts == {"PrefillWorker"}


def test_a_parallel_size_that_takes_the_same_gpus_is_a_restart() -> None:
    assert change("VllmWorker", "tp-size", rules=ReloadRules()).apply_mode is ApplyMode.REPLACE_WORKERS


def test_frontends_read_what_says_their_deadline_in_the_planners_section() -> None:
    rules = ReloadRules(frontend_and_planner_keys={"ttft"})
    assert change("Planner", "ttft", rules=rules).restarts == {"Frontend", "Planner"}
    assert change("Planner", "itl", rules=rules).restarts == {"Planner"}
    assert change("VllmWorker", "ttft", rules=rules).restarts == {"VllmWorker"}


def test_a_planner_for_targets_is_replaced_with_workers_and_frontends() -> None:
    rules = replace(RULES, plans_for_targets=True)
    assert change("VllmWorker", "router", rules=rules).restarts == {"Frontend", "VllmWorker", "Planner"}
    assert change("VllmWorker", "max-num-seqs", rules=rules).restarts == {"VllmWorker", "Planner"}
    assert change("VllmWorker", "max-prefill-queue-size", rules=rules).apply_mode is ApplyMode.LIVE
    assert change("Middle", "router", rules=rules).restarts == {"Middle"}
    assert change("VllmWorker", "router", spec=DISAGG, rules=rules).restarts == {"Frontend", "VllmWorker"}


def test_without_a_frontend_its_workers_read_all_of_their_section() -> None:
    assert change("VllmWorker", "remote-prefill", spec=graph(decode())).restarts == {"VllmWorker"}


def test_what_is_set_anew_or_no_more_is_a_change_and_what_is_equal_is_none() -> None:
    old, new = {"VllmWorker": {"a": 1, "b": 2}}, {"VllmWorker": {"b": 2, "c": 3}}
    gone, come = setting_changes(AGG, old, new, RULES)
    assert (gone.key, gone.before, gone.after, gone.is_removed) == ("a", 1, "-", True)
    assert (come.key, come.before, come.after, come.is_removed) == ("c", "-", 3, False)
    assert setting_changes(AGG, old, old, RULES) == ()


def test_prefill_workers_go_first_then_decode_workers_then_the_others() -> None:
    changes = [change(name, "x", spec=DISAGG) for name in ("Frontend", "VllmWorker", "PrefillWorker")]
    assert [each.name for each in restarted(changes, DISAGG)] == ["PrefillWorker", "VllmWorker", "Frontend"]
