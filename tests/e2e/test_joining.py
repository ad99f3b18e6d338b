"""Programs beside a deployment join it by its statefile; a graph and a program of Dynamo's API run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynaplan.process.guard import guard_command
from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan

GRAPH = """
from dynamo.sdk import async_on_start, depends, dynamo_context, endpoint, service

@service(dynamo={"namespace": "old"}, resources={"cpu": "1"}, traffic={"timeout": 30})
class Backend:
    @async_on_start
    async def start(self):
        self.name = dynamo_context["service_name"]

    @endpoint()
    async def generate(self, request: dict):
        yield f"{request['text']} by {self.name}"

@service(dynamo={"namespace": "old"})
class Front:
    backend = depends(Backend)

    @endpoint()
    async def generate(self, request: dict):
        async for item in self.backend.generate(request):
            yield {"item": item}

Front.link(Backend)
"""

PROGRAM = """
import asyncio
from dynamo._core import DistributedRuntime, VirtualConnectorClient

async def main():
    distributed_runtime = DistributedRuntime(asyncio.get_running_loop(), False)
    client = VirtualConnectorClient(distributed_runtime, "planned")
    await client.wait()
    decision = await client.get()
    await client.complete(decision)
    print(decision.num_prefill_workers, decision.num_decode_workers, decision.decision_id)
    await distributed_runtime.close()

asyncio.run(main())
"""
"""As Dynamo's SLA planner document has it, for a namespace in which somebody has decided."""

ASK = """
import asyncio, dynaplan.runtime

async def main():
    async with dynaplan.runtime.connect() as runtime:
        client = await runtime.namespace("old").component("Front").endpoint("generate").client()
        await client.wait_for_instances()
        print([item async for item in client.round_robin({"text": "asked"})])

asyncio.run(main())
"""

DECIDE = """
import asyncio, dynaplan.runtime
from dynaplan.store.model import Transaction

async def main():
    async with dynaplan.runtime.connect() as runtime:
        keys = {"num_prefill_workers": "2", "num_decode_workers": "3", "decision_id": "7"}
        puts = {f"v1/planned/planner/{name}": value for name, value in keys.items()}
        await runtime.store.commit(Transaction({}, puts))
        while (item := await runtime.store.get("v1/planned/planner/scaled_decision_id")) is None:
            await asyncio.sleep(0.05)
        print(item.value)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("joining")
    (directory / "old.py").write_text(GRAPH)
    for name, text in (("program.py", PROGRAM), ("ask.py", ASK), ("decide.py", DECIDE)):
        (directory / name).write_text(text)
    options = ("--compat", "dynamo", "--working-dir", str(directory))
    with Deployment(directory, "old:Front", "", *options, namespace="old") as made:
        yield made.start()


def output(deployment: Deployment, *command: str) -> str:
    run = subprocess.run(
        command,
        cwd=deployment.directory,
        env=deployment.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_graph_of_dynamos_api_runs_unchanged(deployment: Deployment) -> None:
    assert output(deployment, sys.executable, "ask.py") == "[{'item': 'asked by Backend'}]\n"


def test_a_program_of_dynamos_import_line_carries_a_decision_out(deployment: Deployment) -> None:
    with ThreadPoolExecutor() as threads:
        carried = threads.submit(output, deployment, dynaplan(), "compat", sys.executable, "program.py")
        assert output(deployment, sys.executable, "decide.py") == "7\n"
        assert carried.result(60) == "2 3 7\n"


def test_the_guides_programs_find_the_deployment_by_its_statefile(deployment: Deployment) -> None:
    guide = (REPOSITORY / "docs" / "guides" / "joining.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", guide, re.DOTALL):
        (deployment.directory / name).write_text(text)
    environment = deployment.environment
    serving = subprocess.Popen(
        guard_command([sys.executable, "backend.py"], os.getpid()), cwd=deployment.directory, env=environment
    )
    try:
        asked = subprocess.run(
            [sys.executable, "ask.py"],
            cwd=deployment.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.stdout == "hello!\nthere!\n", asked.stderr
    finally:
        serving.terminate()
        assert serving.wait(30) == 0


def test_without_a_deployment_a_program_is_told_what_to_do(deployment: Deployment, tmp_path: Path) -> None:
    environment = {**deployment.environment, "DYN_LOCAL_STATE_DIR": str(tmp_path)}
    text = "import asyncio, dynaplan.runtime\nasyncio.run(dynaplan.runtime.connect().__aenter__())"
    run = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert f"no deployment is running here ({tmp_path})" in run.stderr
