"""A real API server, the controllers' part played by the test, and a planner with the guide's rights."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.kubernetes.client import CONFIG_MAPS, PODS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.labelled_workloads import DEPLOYMENTS, STATEFUL_SETS
from dynaplan.util.errors import DynaplanError
from tests.fakes.polling import eventually
from tests.k8s.controllers import ADAPTERS, GRAPHS, Controllers
from tests.k8s.environment import BINARY, REASON_FILE
from tests.k8s.server import ApiServer

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "kubernetes"
GUIDE = REPOSITORY / "docs" / "guides" / "kubernetes.md"

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def rights() -> list[Object]:
    """The Role and its RoleBinding, as the guide has them."""
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    (text,) = [block for block in blocks if "kind: RoleBinding" in block]
    return list(yaml.safe_load_all(text))


def workload(role: str, replicas: int, kind: str) -> Object:
    """An object of workers with a GPU each, by the label that the planner looks for."""
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "main", "image": "x", "args": ["--model", "tiny"], "resources": limits}
    template = {"metadata": {"labels": {"app": role}}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": role}}, "template": template}
    metadata = {"name": role, "labels": {"dynaplan.io/role": role}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    directory = Path(os.environ.get("DYNAPLAN_KUBE_APISERVER", "missing"))
    if not (directory / BINARY).exists():
        reason = directory / REASON_FILE
        pytest.skip(reason.read_text() if reason.exists() else "tox -e k8s builds the kube-apiserver")
    made = ApiServer(directory / BINARY, tmp_path_factory.mktemp("kube"))
    try:
        made.start()
        yield made
    finally:
        made.end()


class Cluster:
    """The API server with the clients of an administrator and of the planner, and the controllers."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.admin = self.client("administrator")
        self.controllers = Controllers(self.client("administrator"))
        self._acting: asyncio.Task[None] | None = None

    def client(self, token: str) -> KubernetesClient:
        """A client with the credentials of ``administrator`` or ``planner``."""
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self.server.kubeconfig(token))
        try:
            return KubernetesClient.from_environment({})
        finally:
            os.environ.pop("KUBECONFIG") if before is None else os.environ.update(KUBECONFIG=before)

    async def begin(self) -> None:
        """Make the kinds and the rights, and let the controllers act."""
        for name in ("crd_dgd_reduced.json", "crd_dgdsa.json"):
            with suppress(DynaplanError):
                await self.admin._object("POST", CRDS, json.loads((FIXTURES / name).read_text()))
        await eventually(self._has_graphs)
        await self.allow()
        self.act()

    def act(self) -> None:
        """Have the controllers act from now on."""
        self._acting = asyncio.create_task(self.controllers.run())

    async def rest(self) -> None:
        """Have the controllers act no more."""
        if self._acting:
            self._acting.cancel()
            await asyncio.gather(self._acting, return_exceptions=True)
            self._acting = None

    async def allow(self) -> None:
        """Give the planner the rights of the guide."""
        for resource, document in zip((ROLES, BINDINGS), rights(), strict=True):
            with suppress(DynaplanError):
                await self.admin.create(resource, document)

    async def add_deployment(self, role: str, replicas: int) -> None:
        """Label and make a Deployment of workers with a GPU each."""
        await self.admin.create(DEPLOYMENTS, workload(role, replicas, "Deployment"))

    async def add_stateful_set(self, role: str, replicas: int) -> None:
        """Label and make a StatefulSet of workers with a GPU each."""
        document = workload(role, replicas, "StatefulSet")
        document["spec"]["serviceName"] = role
        await self.admin.create(STATEFUL_SETS, document)

    async def replicas(self, role: str) -> int:
        """The number that a Deployment is asked for."""
        return int((await self.admin.get(DEPLOYMENTS, role))["spec"]["replicas"])

    async def ready(self, name: str) -> int:
        """The number of a Deployment's pods that are ready."""
        return int((await self.admin.get(DEPLOYMENTS, name)).get("status", {}).get("readyReplicas", 0))

    async def end(self) -> None:
        """End the controllers, and delete everything that a test has made."""
        await self.rest()
        for resource in (DEPLOYMENTS, STATEFUL_SETS, GRAPHS, ADAPTERS, CONFIG_MAPS, ROLES, BINDINGS, PODS):
            for found in (await self.admin.list(resource))[0]:
                with suppress(DynaplanError):
                    path = resource.path(self.admin.namespace, found["metadata"]["name"])
                    options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
                    await self.admin._object("DELETE", path, options)
        await self.admin.close()
        await self.controllers.client.close()

    async def _has_graphs(self) -> Any:
        try:
            return [await self.admin.list(GRAPHS), await self.admin.list(ADAPTERS)]
        except DynaplanError:
            return None


@pytest.fixture
async def cluster(server: ApiServer) -> AsyncIterator[Cluster]:
    made = Cluster(server)
    await made.begin()
    yield made
    await made.end()
