"""A worker that was started alone, beside a ``serve`` that neither counts it nor ends it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from tests.e2e.deployment import Deployment
from tests.fakes.components import RunningComponent
from tests.fakes.polling import wait_until


async def test_an_unmanaged_worker_is_shown_and_left_alone_by_scaling_and_by_the_end(tmp_path: Path) -> None:
    running = Deployment(tmp_path, "graphs.agg:Frontend", "agg.yaml", "--Planner.no-operation=true")
    with closing(running):
        running.start()
        environment = {"XDG_RUNTIME_DIR": str(running.runtime_base)}
        alone = RunningComponent(tmp_path, environment, "worker", "--namespace", running.namespace)
        try:
            await alone.spawn().ready()
            running.scale(decode=2)
            shown = json.loads(running.run("status", "--json").stdout)["workers"]
            (row,) = (each for each in shown if not each["is_managed"])
            assert (row["pid"], row["state"], row["role"]) == (alone.pid, "ready", "decode")
            assert len({tuple(each["gpus"]) for each in shown if each["role"] == "decode"}) == 3
            running.scale(decode=1)
            assert running.stop() == 0
            wait_until(lambda: f"serve has not started them: {row['worker']}" in running.text)
            assert alone.process
            assert alone.process.poll() is None
            alone.interrupt()
            assert await alone.exit_code() == 0
        finally:
            alone.kill()
