"""GPUs are named, checked and reserved by ``dynaplan reserve``, and given back by ``release``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli import reserve
from dynaplan.cli.reserve import check_known, parse_gpus, parse_release
from dynaplan.contract.holds import RESERVATIONS, Hold, ReservedGpus
from dynaplan.contract.store_keys import scaling_key
from dynaplan.fleet import deployments, scale_progress
from dynaplan.fleet.rules.statefile import with_planner_keys
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.recorders.manual_changes import manual_changes
from dynaplan.store import connections
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, TemporaryError
from tests.unit.fleet.rules.graphs import box, worker

KEY = scaling_key("ns", RESERVATIONS)


@pytest.mark.parametrize(("text", "gpus"), [("gpu=7", [7]), ("gpu=6,7", [6, 7]), ("gpu=4-6,9", [4, 5, 6, 9])])
def test_gpus_are_named_by_numbers_lists_and_ranges(text: str, gpus: list[int]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["7", "gpu=", "gpu=x", "gpu=1-", "gpu=-1", "gpu=1,,2", "gpu=1000000000"])
def test_any_other_name_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="no GPUs are named so") as refusal:
        parse_gpus(text)
    assert "gpu=6,7" in str(refusal.value.hint)


def test_a_range_that_ends_before_it_begins_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(ConfigError, match="gpu=1,7-4: 7-4 ends before it begins") as refusal:
        parse_gpus("gpu=1,7-4")
    assert refusal.value.hint == "Expected gpu=4-7."


def test_a_gpu_must_be_there() -> None:
    check_known([3], box(4))
    with pytest.raises(ConfigError, match="GPU 4,5: the deployment has 0, 1, 2, 3"):
        check_known([4, 5], box(4))


def test_roles_and_gpus_are_released_by_their_names() -> None:
    assert parse_release(["decode", "gpu=7", "gpu=1-2"]) == ([Role.DECODE], frozenset({1, 2, 7}))
    assert parse_release([]) == ([], frozenset())
    with pytest.raises(ConfigError, match="no such role"):
        parse_release(["decod"])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A deployment with a worker on GPU 0, and its store."""
    store = MemoryStore(SystemClock())

    async def closed() -> None:
        return None

    monkeypatch.setattr(store, "close", closed)
    found = SimpleNamespace(
        namespace="ns",
        workers=(worker("VllmWorker", gpus=(0,)),),
        document={},
        runtime_dir=Path("/nowhere"),
        log_dir=tmp_path,
        store=store,
    )
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    monkeypatch.setattr(scale_progress, "check_alive", lambda _: None)
    monkeypatch.setattr(deployments, "find_deployment", lambda _: found)
    return found


async def reserved(found: Any) -> ReservedGpus:
    item = await found.store.get(KEY)
    return ReservedGpus.from_text(item.value if item else "")


async def test_a_reservation_is_kept_beside_others_and_released_alone(
    found: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = Hold(by="me", uid=os.getuid()), Hold(by="alice", uid=os.getuid() + 1)
    await found.store.put(KEY, ReservedGpus({3: other}).to_text())
    await reserve._reserve(found, [0, 1], mine)
    assert await reserved(found) == ReservedGpus({0: mine, 1: mine, 3: other})
    with pytest.raises(ConfigError, match="GPU 3 is reserved by alice"):
        await reserve._reserve(found, [3], mine)
    await reserve._release_gpus(found, frozenset({0, 2}))
    assert await reserved(found) == ReservedGpus({1: mine, 3: other})
    assert "GPU 2 is not reserved" in capsys.readouterr().out
    assert [each.what for each in manual_changes(found.log_dir, 9)] == [
        "GPU 0,1 reserved by me until `dynaplan release`",
        "released GPU 0, it was reserved by me until `dynaplan release`",
    ]


async def test_the_gpus_that_nobody_has_reserved_must_do_for_a_decode_worker(found: Any) -> None:
    mine = Hold(by="me", uid=os.getuid())
    await reserve._reserve(found, [0, 1], mine, gpus=4)
    await reserve._reserve(found, [1, 2], mine, gpus=4)
    with pytest.raises(ConfigError, match="leaves 0 GPUs, and a decode worker takes 1"):
        await reserve._reserve(found, [3], mine, gpus=4)
    assert (await reserved(found)).by_gpu.keys() == {0, 1, 2}
    await reserve._reserve(found, [3], mine)  # with --yes
    assert (await reserved(found)).by_gpu.keys() == {0, 1, 2, 3}


async def test_the_command_waits_until_no_worker_holds_the_gpu(found: Any) -> None:
    found.document = with_planner_keys({}, {RESERVATIONS: ReservedGpus({0: Hold(), 1: Hold()}).to_text()})
    await reserve.wait_until_free(found, [1], 0.0, "hint")
    with pytest.raises(TemporaryError, match=r"not free within 0 s: dynamo_VllmWorker \(ready\)"):
        await reserve.wait_until_free(found, [0, 1], 0.0, "hint")


async def test_a_gpu_is_not_free_before_the_plugin_keeps_its_next_worker_off_it(found: Any) -> None:
    with pytest.raises(TemporaryError, match="has not read the reservation yet"):
        await reserve.wait_until_free(found, [1], 0.0, "hint")


@pytest.mark.parametrize("is_reserved", [True, False])
def test_a_release_of_everything_says_nothing_is_held_only_when_nothing_was(
    found: Any, monkeypatch: pytest.MonkeyPatch, is_reserved: bool
) -> None:
    monkeypatch.setattr(reserve, "connect", lambda _: found)
    monkeypatch.setattr(reserve, "planner_settings", lambda _: None)
    if is_reserved:
        asyncio.run(reserve._reserve(found, [1], Hold(by="me", uid=os.getuid())))
    answer = CliRunner().invoke(reserve.release, []).output
    assert answer.startswith("released GPU 1: it was" if is_reserved else "nothing is held")
    assert len(answer.splitlines()) == 1
