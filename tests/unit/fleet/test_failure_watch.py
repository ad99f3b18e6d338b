"""That a service can never start is said once, with its log, and may end the deployment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dynaplan.fleet.watchdog import FailureWatch
from dynaplan.graph.lifecycle import Worker
from tests.unit.fleet.rules.graphs import FAILED, READY, worker

LOST = replace(worker("VllmWorker", FAILED), reason="can never start (exit code 78)")


async def test_a_service_without_hope_is_named_once_and_again_when_it_is_lost_anew() -> None:
    workers: list[Worker] = [worker("VllmWorker", READY)]
    said, lost = list[str](), list[bool]()
    watch = FailureWatch(
        cast(Any, SimpleNamespace(read=lambda: workers)),
        Path("/logs"),
        said.append,
        lambda: lost.append(True),
    )
    await watch.check()
    assert said == []
    for _ in range(2):
        workers[:] = [LOST]
        await watch.check()
        await watch.check()
        workers[:] = []
        await watch.check()
    line = "No VllmWorker can start: can never start (exit code 78)\n    log: /logs/dynamo_VllmWorker.log"
    assert said == [line, line]
    assert lost == [True, True]
