"""What a person may tell circus about workers, and what is answered in words."""

from __future__ import annotations

import pytest
from circus.commands import get_commands

from dynaplan.fleet.arbiter import CommandAnswer, answer

WORKERS = ["dynamo_Frontend", "dynamo_VllmWorker", "dynamo_VllmWorker_1"]
SERVERS = ["dynamo_etcd", "dynamo_nats", "dynamo_fleet"]

ENDS_OR_CHANGES = {"incr", "decr", "stop", "rm", "set", "reload"}
READS_OR_SIGNALS = {
    *("add", "dstats", "get", "globaloptions", "ipython", "kill", "list", "listen", "listsockets"),
    *("numprocesses", "numwatchers", "options", "quit", "reloadconfig", "signal", "stats", "status"),
}
"""What circus does right for each watcher: what is killed is started again."""


def test_every_command_of_circus_is_judged_for_every_watcher() -> None:
    refused, replaced = {}, {}
    for command in get_commands():
        for name in (*WORKERS, *SERVERS):
            found = answer(command, {"name": name}, WORKERS, SERVERS)
            refused.setdefault(command, set()).update({name} if found.refusal else ())
            replaced.setdefault(command, set()).update(found.to_replace)
    every = {*WORKERS, *SERVERS}
    assert {command for command, names in refused.items() if names == every} == ENDS_OR_CHANGES
    assert {command: names for command, names in refused.items() if names and names != every} == {
        "start": set(WORKERS)
    }
    assert {command: names for command, names in replaced.items() if names} == {"restart": set(WORKERS)}
    assert set(refused) == ENDS_OR_CHANGES | READS_OR_SIGNALS | {"start", "restart"}


@pytest.mark.parametrize("name", SERVERS)
def test_what_nothing_starts_again_is_not_stopped(name: str) -> None:
    refusal = answer("stop", {"name": name}, WORKERS, SERVERS).refusal
    assert refusal == (
        f"{name} is a process that the deployment needs: circusctl restart {name} starts it anew; "
        "`dynaplan stop` ends the deployment in order"
    )


@pytest.mark.parametrize(
    "properties", [{"name": "DYNAMO_e*"}, {"name": ".*etcd", "match": "regex"}, {"name": "dynamo_[d-e]*"}]
)
def test_a_pattern_stops_nothing_that_its_name_would_not(properties: dict[str, str]) -> None:
    assert answer("stop", properties, WORKERS, SERVERS).refusal.startswith("dynamo_etcd is ")
    assert answer("stop", {"name": "(", "match": "regex"}, WORKERS, SERVERS) == CommandAnswer()


@pytest.mark.parametrize("command", ["incr", "decr", "stop", "start", "rm", "set", "reload", "STOP"])
def test_what_circus_would_get_wrong_about_a_worker_is_refused_with_what_to_do(command: str) -> None:
    refusal = answer(command, {"name": "dynamo_VllmWorker"}, WORKERS).refusal
    assert refusal.startswith("dynamo_VllmWorker is a worker of dynaplan: ")
    assert "dynaplan" in refusal.partition(": ")[2] or "circusctl restart dynamo_VllmWorker" in refusal


def test_a_restart_replaces_the_workers_that_circus_would_find() -> None:
    assert answer("restart", {"name": "DYNAMO_vllm*"}, WORKERS).to_replace == tuple(WORKERS[1:])


@pytest.mark.parametrize("command", ["stop", "start", "restart", "reload", "reloadconfig"])
def test_a_command_to_everything_names_its_better_way(command: str) -> None:
    assert answer(command, {}, WORKERS).refusal.startswith(f"{command} of everything: ")


@pytest.mark.parametrize(
    ("command", "properties"),
    [
        ("status", {}),
        ("signal", {"name": "dynamo_VllmWorker"}),
        ("restart", {"name": "dynamo_etcd"}),
        ("quit", {}),
        ("stop", {"name": "a_program_that_somebody_added"}),
        ("get", {"name": 7}),
    ],
)
def test_everything_else_is_circus_own_business(command: str, properties: dict[str, object]) -> None:
    assert answer(command, properties, WORKERS, SERVERS) == CommandAnswer()
