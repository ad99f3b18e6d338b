"""What a person may tell circus about workers, and what is answered in words."""

from __future__ import annotations

import pytest

from dynaplan.fleet.arbiter import CommandAnswer, answer

WORKERS = ["dynamo_Frontend", "dynamo_VllmWorker", "dynamo_VllmWorker_1"]


@pytest.mark.parametrize("command", ["incr", "decr", "stop", "start", "rm", "set", "reload", "STOP"])
def test_what_circus_would_get_wrong_about_a_worker_is_refused_with_what_to_do(command: str) -> None:
    refusal = answer(command, {"name": "dynamo_VllmWorker"}, WORKERS).refusal
    assert refusal.startswith("dynamo_VllmWorker is a worker of dynaplan: ")
    assert "dynaplan" in refusal.partition(": ")[2] or "circusctl restart dynamo_VllmWorker" in refusal


def test_a_restart_replaces_the_workers_that_circus_would_find() -> None:
    assert answer("restart", {"name": "DYNAMO_vllm*"}, WORKERS).to_replace == tuple(WORKERS[1:])


@pytest.mark.parametrize("command", ["stop", "start", "restart", "reload"])
def test_a_command_to_everything_names_its_better_way(command: str) -> None:
    assert answer(command, {}, WORKERS).refusal.startswith(f"{command} of everything: ")


@pytest.mark.parametrize(
    ("command", "properties"),
    [
        ("status", {}),
        ("signal", {"name": "dynamo_VllmWorker"}),
        ("restart", {"name": "dynamo_etcd"}),
        ("quit", {}),
        ("stop", {"name": "dynamo_nats"}),
        ("get", {"name": 7}),
    ],
)
def test_everything_else_is_circus_own_business(command: str, properties: dict[str, object]) -> None:
    assert answer(command, properties, WORKERS) == CommandAnswer()
