"""Programs beside a deployment join it by its statefile; a graph and a program of the original's API run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.process.guard import guarded
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
        lease = dynamo_context["endpoints"][0].lease_id()
        component = dynamo_context["runtime"].namespace("old").component("Front")
        client = await component.endpoint("generate").client()
        yield lease in client.instance_ids()

Front.link(Backend)
"""

PROGRAM = """
import asyncio
from dynamo.runtime import DistributedRuntime, dynamo_worker

@dynamo_worker()
async def main(runtime: DistributedRuntime):
    client = await runtime.namespace("old").component("Front").endpoint("generate").client()
    await client.wait_for_instances()
    print([item.data() async for item in await client.round_robin({"text": "asked"})])

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("joining")
    (directory / "old.py").write_text(GRAPH)
    (directory / "program.py").write_text(PROGRAM)
    options = ("--compat", "dynamo", "--working-dir", str(directory))
    made = Deployment(directory, "old:Front", "", *options, namespace="old")
    try:
        yield made.start()
    finally:
        made.close()


def test_a_graph_and_a_program_of_the_originals_api_run_unchanged(deployment: Deployment) -> None:
    command = [dynaplan(), "compat", sys.executable, "program.py"]
    run = subprocess.run(
        command, cwd=deployment.directory, env=deployment.environment, capture_output=True, text=True
    )
    assert run.stdout == "[{'item': 'asked by Backend'}, True]\n", run.stderr


def test_the_guides_programs_find_the_deployment_by_its_statefile(deployment: Deployment) -> None:
    guide = (REPOSITORY / "docs" / "guides" / "joining.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", guide, re.DOTALL):
        (deployment.directory / name).write_text(text)
    environment = deployment.environment
    serving = subprocess.Popen(
        guarded([sys.executable, "backend.py"], os.getpid()), cwd=deployment.directory, env=environment
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
