"""Rows of ``dynaplan status`` for unmanaged components."""

from __future__ import annotations

import os
from dataclasses import replace

from dynaplan.cli.watching.rows import alone_row, out_of_reach, uptime_s, worker_row
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.process import process_table
from dynaplan.store.instances import Instance
from tests.unit.cli.watching.test_status import table, worker


def unmanaged(network: str) -> Instance:
    card = {"role": "decode", "gpus": [3]}
    return Instance(
        *("box", "VllmWorker", "generate", 5, "http://127.0.0.1:9"),
        worker="box_VllmWorker_gpu1_77",
        pid=os.getpid(),
        card=card,
        host="gpu1",
        network=network,
        is_managed=False,
    )


def test_a_row_has_the_keys_of_a_managed_workers() -> None:
    row = alone_row(unmanaged(process_table.network()), WorkerLoad())
    managed = worker_row(worker("VllmWorker"), None, None)
    assert managed.keys() <= row.keys()
    assert (row["role"], row["state"], row["gpus"], row["is_managed"]) == ("decode", "ready", [3], False)
    assert (row["running"], row["host"]) == (0, "gpu1")
    assert row["uptime_s"] > 0
    assert "box_VllmWorker_gpu1_77" in table([row])


def test_the_age_of_a_process_of_another_host_is_not_known() -> None:
    row = alone_row(unmanaged("another boot/1"), None)
    assert (row["uptime_s"], row["running"]) == (None, None)
    assert uptime_s(0) is None


def test_decode_workers_that_prefill_workers_cannot_reach_are_named() -> None:
    decode = unmanaged("here")
    prefill = replace(decode, card={"role": "prefill"}, network="there")
    (line,) = out_of_reach([decode, prefill])
    assert line.startswith("box_VllmWorker_gpu1_77 computes prompts itself")
    assert out_of_reach([decode, replace(prefill, network="here")]) == []
    assert out_of_reach([decode]) == []
