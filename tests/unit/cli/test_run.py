"""``dynaplan run``: what is asked for is checked before anybody leaves a GPU for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.cli import run
from dynaplan.cli.run import (
    Loan,
    LoanRequest,
    check_program,
    moment_of,
    parse_memory,
    parse_time,
    shown_command,
)
from dynaplan.contract.gpus import Gpu
from dynaplan.contract.holds import Hold, ReservedGpus
from dynaplan.fleet import deployments
from dynaplan.fleet.rules.lending import LendableGpu
from dynaplan.process import process_table
from dynaplan.util.errors import ConfigError, DeploymentError, DynaplanError, StoreUnavailable

NOW = datetime(2026, 11, 22, 21, 30)


@pytest.mark.parametrize(("text", "day", "hour"), [("22:00", 22, 22), ("06:00", 23, 6), ("21:30", 23, 21)])
def test_it_begins_the_next_time_that_a_clock_shows_it(text: str, day: int, hour: int) -> None:
    moment = moment_of(text, NOW)
    assert (moment.day, moment.hour) == (day, hour)


@pytest.mark.parametrize("text", ["25:00", "22", "22:60", "soon", ""])
def test_no_time_of_a_day_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="no time of a day") as refusal:
        moment_of(text, NOW)
    assert refusal.value.hint == "For example 22:00."


def test_amounts_and_times_are_refused_with_what_is_meant() -> None:
    assert parse_memory("20GB") == 20 * 10**9
    with pytest.raises(ConfigError, match="--memory 20: expected an amount") as refusal:
        parse_memory("20")
    assert refusal.value.hint == "--memory 20GB?"
    with pytest.raises(ConfigError, match="--memory much: expected an amount"):
        parse_memory("much")
    assert parse_time("--for", "2h") == 7200.0
    with pytest.raises(ConfigError, match="--for 0s: expected a time"):
        parse_time("--for", "0s")


def test_a_program_that_is_not_there_is_refused() -> None:
    check_program("sh")
    with pytest.raises(ConfigError, match="there is no program 'graphs") as refusal:
        check_program("graphs.agg:Frontend")
    assert "`dynaplan serve`" in str(refusal.value.hint)


def test_others_see_a_command_short_printable_and_without_its_secrets() -> None:
    assert shown_command(["python", "train.py", "--api-key", "s3cret"]) == "python train.py --api-key '***'"
    assert shown_command(["a\nb"]) == "'a b'"
    assert len(shown_command(["x" * 999])) == 60


STORE_AWAY = StoreUnavailable("etcd did not answer")
NONE_RUNS = DeploymentError("no deployment ns is running here")


def loan_for(monkeypatch: pytest.MonkeyPatch, faults: list[DynaplanError], *alive: bool) -> Loan:
    """A loan that meets these faults, with a deployment whose serve is ``alive`` after each of them."""
    made = Hold(since_s=0.0, by="alice", holder=process_table.identity_of(os.getpid()))
    found: Any = SimpleNamespace(namespace="ns", arbiter=made.holder)
    loan = Loan(found, LoanRequest(1, 0, 60.0, is_confirmed=False, made=made))
    is_alive = iter(alive)
    monkeypatch.setattr(process_table, "is_alive", lambda _: next(is_alive))
    monkeypatch.setattr(run, "WORKERS_POLL_S", 0.0)

    async def reserve() -> tuple[()]:
        if faults:
            raise faults.pop(0)
        cast(Any, loan)._found = None
        return ()

    monkeypatch.setattr(loan, "_reserve", reserve)
    return loan


async def test_who_waits_when_the_deployment_ends_takes_what_the_box_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await loan_for(monkeypatch, [STORE_AWAY, NONE_RUNS, NONE_RUNS], True, True, False).obtain()
    assert "the deployment ns has ended; its GPUs are free" in capsys.readouterr().err


async def test_a_fault_of_a_deployment_that_lives_is_no_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        await loan_for(monkeypatch, [ConfigError("too many")], True).obtain()


async def test_who_reserves_again_is_in_nobodys_way_and_has_one_gpu_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Hold(since_s=0.0, by="alice", holder=process_table.identity_of(os.getpid()))
    others = Hold(since_s=0.0, by="bob")
    gpus = (Gpu(0, "GPU-SIM-0"), Gpu(1, "GPU-SIM-1"), Gpu(2, "GPU-SIM-2"))
    found: Any = SimpleNamespace(namespace="ns", arbiter=made.holder, workers=(), document={})
    reserved = ReservedGpus({0: others})
    faults: list[DynaplanError] = [STORE_AWAY]

    async def change_entries(*args: Any) -> None:
        nonlocal reserved
        change: Callable[[ReservedGpus], ReservedGpus] = args[-1]
        reserved = change(reserved)

    async def wait_until_free(*_: Any) -> None:
        if faults:
            raise faults.pop(0)

    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    monkeypatch.setattr(deployments, "find_deployment", lambda _: found)
    for name, fake in {
        "WORKERS_POLL_S": 0.0,
        "connected": lambda _: nullcontext(),
        "inventory_of": lambda _: gpus,
        "record_by_hand": lambda *_: None,
        "_lendable_gpus": lambda _: [LendableGpu(each, ()) for each in gpus],
        "change_entries": change_entries,
        "wait_until_free": wait_until_free,
    }.items():
        monkeypatch.setattr(run, name, fake)
    monkeypatch.setattr(run.connections, "open_store", lambda: nullcontext())
    loan = Loan(found, LoanRequest(1, 0, 60.0, is_confirmed=True, made=made))
    await loan.obtain()
    assert not faults
    assert reserved.by_gpu == {0: others, 2: made}
