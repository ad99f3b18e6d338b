"""The client of the Kubernetes API: its paths, its errors, its credentials."""

from __future__ import annotations

import sys

import pytest

from dynaplan.kubernetes.client import CONFIG_MAPS, PODS, KubernetesClient, Resource
from dynaplan.util.errors import (
    ClusterConflict,
    ClusterExpired,
    ClusterForbidden,
    ClusterNotFound,
    ClusterRefused,
    ClusterUnavailable,
    ConfigError,
)
from tests.fakes.kube_api import KubeApi, httpx2

DEPLOYMENTS = Resource("apps", "v1", "deployments")
KUBECONFIG = """
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: team-a}}]
users: [{name: u, user: {token: secret}}]
current-context: x
"""


@pytest.fixture
def api():
    return KubeApi()


@pytest.fixture
async def client(api):
    made = api.client()
    yield made
    await made.close()


def config_map(name: str, **labels: str) -> dict:
    return {"metadata": {"name": name, "labels": labels}, "data": {}}


def test_paths_are_those_of_the_api() -> None:
    assert PODS.path("ns") == "/api/v1/namespaces/ns/pods"
    assert DEPLOYMENTS.path("ns", "d", "scale") == "/apis/apps/v1/namespaces/ns/deployments/d/scale"
    assert (CONFIG_MAPS.api_version, DEPLOYMENTS.api_version) == ("v1", "apps/v1")


async def test_an_object_is_made_read_changed_and_deleted(client):
    await client.create(CONFIG_MAPS, config_map("a", app="x"))
    await client.create(CONFIG_MAPS, config_map("b"))
    await client.patch(CONFIG_MAPS, "a", {"data": {"k": "v"}})
    assert (await client.get(CONFIG_MAPS, "a"))["data"] == {"k": "v"}
    found, version = await client.list(CONFIG_MAPS, "app=x")
    assert [each["metadata"]["name"] for each in found] == ["a"]
    assert int(version) > 100
    await client.delete(CONFIG_MAPS, "a")
    with pytest.raises(ClusterNotFound):
        await client.get(CONFIG_MAPS, "a")


async def test_a_write_over_another_version_is_a_conflict(client):
    made = await client.create(CONFIG_MAPS, config_map("a"))
    await client.replace(CONFIG_MAPS, "a", made)
    for write in (client.replace(CONFIG_MAPS, "a", made), client.create(CONFIG_MAPS, config_map("a"))):
        with pytest.raises(ClusterConflict):
            await write


async def test_a_missing_right_is_said_with_the_request_and_the_way_out(api, client):
    api.denied = {("list", "pods")}
    with pytest.raises(ClusterForbidden, match=r"(?s)cannot list resource .pods.*Role"):
        await client.list(PODS)


async def test_an_object_that_is_wrong_in_itself_is_refused(api, client):
    api.add("/apis/apps/v1", "deployments", {"metadata": {"name": "d"}, "spec": {"replicas": 1}})
    with pytest.raises(ClusterRefused, match="greater than or equal to 0"):
        await client.patch(DEPLOYMENTS, "d", {"spec": {"replicas": -1}}, "scale")


async def test_a_group_that_is_not_served_is_not_there(api, client):
    api.served = {"/api/v1"}
    with pytest.raises(ClusterNotFound, match="404 page not found"):
        await client.get(DEPLOYMENTS, "d")


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_a_server_that_cannot_now_is_unavailable(code):
    transport = httpx2.MockTransport(lambda request: httpx2.Response(code, text="etcd leader changed"))
    client = KubernetesClient(httpx2.AsyncClient(transport=transport, base_url="https://c.test"), "ns")
    with pytest.raises(ClusterUnavailable, match="leader changed"):
        await client.get(PODS, "p")
    await client.close()


async def test_a_server_that_is_away_is_unavailable(api, client):
    api.is_available = False
    for call in (client.get(PODS, "p"), anext(client.watch(PODS))):
        with pytest.raises(ClusterUnavailable, match="does not answer"):
            await call


async def test_a_proxy_that_answers_with_a_page_is_unavailable():
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text="<html>log in</html>"))
    client = KubernetesClient(httpx2.AsyncClient(transport=transport, base_url="https://c.test"), "ns")
    with pytest.raises(ClusterUnavailable):
        await client.get(PODS, "p")
    await client.close()


async def test_a_watch_tells_changes_after_a_version(client):
    made = await client.create(CONFIG_MAPS, config_map("a"))
    await client.patch(CONFIG_MAPS, "a", {"data": {"k": "v"}})
    await client.delete(CONFIG_MAPS, "a")
    version = made["metadata"]["resourceVersion"]
    seen = [(kind, found["data"]) async for kind, found in client.watch(CONFIG_MAPS, version=version)]
    assert seen == [("MODIFIED", {"k": "v"}), ("DELETED", {"k": "v"})]


async def test_a_watch_from_a_forgotten_version_has_expired():
    event = '{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}\n'
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text=event))
    client = KubernetesClient(httpx2.AsyncClient(transport=transport, base_url="https://c.test"), "ns")
    with pytest.raises(ClusterExpired):
        await anext(client.watch(PODS, version="1"))
    await client.close()


async def test_credentials_and_the_namespace_come_from_the_kubeconfig(tmp_path, monkeypatch):
    (tmp_path / "config").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    for environ, expected in (({}, "team-a"), ({"POD_NAMESPACE": "team-b"}, "team-b")):
        client = KubernetesClient.from_environment(environ)
        assert client.namespace == expected
        with pytest.raises(ClusterUnavailable):
            await client.get(PODS, "p")
        await client.close()


EXEC = "{apiVersion: client.authentication.k8s.io/v1beta1, command: %s}"


@pytest.mark.parametrize(
    "user", [f"exec: {EXEC % '/bin/false'}", f"exec: {EXEC % '/no/program'}", "tokenFile: /no/file"]
)
async def test_credentials_that_cannot_be_had_at_the_moment_are_unavailable(user, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(KUBECONFIG.replace("token: secret", user))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    client = KubernetesClient.from_environment({})
    for call in (client.get(PODS, "p"), anext(client.watch(PODS))):
        with pytest.raises(ClusterUnavailable):
            await call
    await client.close()


@pytest.mark.parametrize("text", ["clusters: []\n", "[]", "current-context: x\nclusters: []\ncontexts: []\n"])
def test_a_kubeconfig_that_cannot_be_read_is_an_error_of_the_user(text, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        KubernetesClient.from_environment({})


def test_no_credentials_at_all_are_an_error_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="credentials"):
        KubernetesClient.from_environment({})


def test_without_lightkube_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightkube.config", None)
    with pytest.raises(ConfigError, match="pip install lightkube"):
        KubernetesClient.from_environment({})
