"""Scaling a namespace whose ``serve`` runs on another host."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli.main import group
from dynaplan.planner.deployment import SubComponentNotFoundError
from dynaplan.store.file_store import FileStore
from dynaplan.store.kubernetes_client import KubernetesClient
from dynaplan.util.errors import ClusterUnavailable, ConfigError, PermanentError, TemporaryError
from tests.fakes.kube_api import KubeApi
from tests.fakes.pod_controller import APPS, PodController
from tests.unit.cli.test_scale import FLEET


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    return {"DYN_FILE_KV": str(tmp_path / "kv"), "DYN_LOCAL_STATE_DIR": str(tmp_path / "state")}


def scaled(environment: dict[str, str], *arguments: str) -> Result:
    arguments = ("scale", *arguments, "--namespace", "ns", "--store", "file")
    return CliRunner().invoke(group, arguments, env={**environment, "DYN_DISCOVERY_BACKEND": None})


def keys(environment: dict[str, str], **written: str) -> dict[str, str]:
    """Write keys of the namespace; return all."""

    async def read() -> dict[str, str]:
        store = FileStore.from_environment(environment)
        for name, value in written.items():
            await store.put(f"v1/ns/{name.replace('__', '/')}", value)
        items = await store.list("v1/ns/planner/")
        await store.close()
        return {item.key.removeprefix("v1/ns/planner/"): item.value for item in items}

    return asyncio.run(read())


def test_a_namespace_of_which_no_serve_is_known_is_not_scaled(environment: dict[str, str]) -> None:
    result = scaled(environment, "decode=2")
    assert result.exit_code != 0
    assert "no `dynaplan serve` of namespace ns is known to the store" in str(result.exception)
    assert keys(environment) == {}


def test_counts_are_written_and_their_acknowledgement_is_awaited(environment: dict[str, str]) -> None:
    keys(environment, fleet=FLEET, planner__num_decode_workers="1", planner__decision_id="1")
    result = scaled(environment, "decode=2", "--no-wait")
    assert result.output == "asked for decode=2 (decision 2)\n"
    assert keys(environment)["num_decode_workers"] == "2"
    late = scaled(environment, "decode=+1", "--timeout", "0.2")
    assert "not acknowledged within 0.2 s" in str(late.exception)
    acknowledging = threading.Timer(0.5, lambda: keys(environment, planner__scaled_decision_id="9"))
    acknowledging.start()
    done = scaled(environment, "decode=2")
    acknowledging.join()
    assert done.output.splitlines()[-1] == "carried out"


def test_without_a_store_a_deployment_must_run_here(environment: dict[str, str]) -> None:
    state = {"DYN_LOCAL_STATE_DIR": environment["DYN_LOCAL_STATE_DIR"]}
    result = CliRunner().invoke(group, ("scale", "decode=2", "--namespace", "ns"), env=state)
    assert "no deployment ns is running here" in str(result.exception)


CORE = "/api/v1"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> KubeApi:
    """A cluster with one prefill and two decode workers."""
    made = KubeApi()
    pods = PodController(made)
    pods.add_deployment("prefill", 1)
    pods.add_deployment("decode", 2)
    monkeypatch.setattr(KubernetesClient, "from_environment", lambda environ: made.client())
    for name in ("DYN_NAMESPACE", "DYN_PARENT_DGD_K8S_NAME"):
        monkeypatch.delenv(name, raising=False)
    return made


def run(command: str, *arguments: str) -> Result:
    words = (command, *arguments, "--environment", "kubernetes", "--namespace", "ns")
    return CliRunner().invoke(group, words)


def written(api: KubeApi) -> dict[str, str]:
    found: dict[str, str] = api.objects[CORE, "configmaps", "dynaplan-ns"]["data"]
    return found


def test_numbers_are_written_for_the_planner_and_nothing_is_scaled_here(api: KubeApi) -> None:
    result = run("scale", "decode=+1", "--no-wait")
    assert result.output == "asked for decode=3 (decision 0)\n"
    assert written(api) == {
        "num_prefill_workers": "1",
        "num_decode_workers": "3",
        "decision_id": "0",
        "unfinished": '{"decode": {"from": 2, "to": 3}}',
    }
    assert api.objects[APPS, "deployments", "decode"]["spec"]["replicas"] == 2


def test_what_kubectl_scale_asked_for_is_where_plus_one_begins(api: KubeApi) -> None:
    api.change(APPS, "deployments", "decode", spec={"replicas": 4})
    assert "decode=5" in run("scale", "decode=+1", "--no-wait").output


def test_it_waits_until_the_planner_has_carried_it_out(api: KubeApi) -> None:
    run("scale", "prefill=2", "--no-wait")

    def acknowledge() -> None:
        api.change(CORE, "configmaps", "dynaplan-ns", data={"scaled_decision_id": "9"})

    acknowledging = threading.Timer(0.5, acknowledge)
    acknowledging.start()
    done = run("scale", "decode=3")
    acknowledging.join()
    assert done.output.splitlines() == [
        "asked for decode=3 (decision 1)",
        "waiting for the planner of namespace ns to carry it out",
        "carried out",
    ]
    assert json.loads(written(api)["unfinished"]) == {
        "prefill": {"from": 1, "to": 2},
        "decode": {"from": 2, "to": 3},
    }


def test_without_a_planner_it_says_what_carries_it_out(api: KubeApi) -> None:
    late = run("scale", "decode=3", "--timeout", "0.3")
    assert isinstance(late.exception, TemporaryError)
    assert "dynaplan planner --environment kubernetes" in late.exception.hint


def test_a_later_decision_ends_the_wait(api: KubeApi) -> None:
    def overtake() -> None:
        api.change(CORE, "configmaps", "dynaplan-ns", data={"decision_id": "5"})

    overtaking = threading.Timer(0.5, overtake)
    overtaking.start()
    late = run("scale", "decode=3")
    overtaking.join()
    assert isinstance(late.exception, PermanentError)
    assert "overtaken by decision 5" in str(late.exception)


def test_holds_are_made_kept_and_released(api: KubeApi) -> None:
    held = run("scale", "decode=3", "--hold", "--no-wait")
    assert "decode is held at 3" in held.output
    assert json.loads(written(api)["holds"])["decode"]["at_least"] == 3
    refused = run("scale", "decode=1", "--no-wait")
    assert isinstance(refused.exception, ConfigError)
    assert "dynaplan release decode" in refused.exception.hint
    released = run("release", "decode")
    assert released.output.startswith("released decode: it was held")
    assert json.loads(written(api)["holds"]) == {}
    assert run("release").output == "nothing is held\n"
    assert "decode=1" in run("scale", "decode=1", "--no-wait").output


def test_a_planner_that_decides_meanwhile_is_read_again(api: KubeApi) -> None:
    run("scale", "decode=3", "--no-wait")
    asked: list[str] = []

    def meanwhile(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("configmaps/dynaplan-ns") and not asked:
            asked.append(path)
            api.change(CORE, "configmaps", "dynaplan-ns", data={"decision_id": "7"})

    api.before = meanwhile
    assert "(decision 8)" in run("scale", "decode=1", "--no-wait").output


def test_a_planner_that_decides_all_the_time_is_told_as_that(api: KubeApi) -> None:
    run("scale", "decode=3", "--no-wait")

    def meddle(method: str, path: str) -> None:
        if method == "PATCH":
            api.change(CORE, "configmaps", "dynaplan-ns", metadata={"labels": {"n": str(len(api.requests))}})

    api.before = meddle
    refused = run("scale", "decode=1", "--no-wait")
    assert "changed by somebody else" in str(refused.exception)


def test_mistakes_are_told_before_anything_is_written(api: KubeApi) -> None:
    api.remove(APPS, "deployments", "prefill")
    answers: dict[tuple[str, ...], Any] = {
        ("decode=0",): ConfigError,
        ("decode=3", "--leaving", "decode-1"): ConfigError,
        ("prefill=1",): SubComponentNotFoundError,
        ("decod=1",): ConfigError,
    }
    for arguments, error in answers.items():
        assert isinstance(run("scale", *arguments, "--no-wait").exception, error), arguments
    assert (CORE, "configmaps", "dynaplan-ns") not in api.objects
    api.is_available = False
    assert isinstance(run("scale", "decode=3", "--no-wait").exception, ClusterUnavailable)


def test_a_planner_carries_out_what_was_written(api: KubeApi) -> None:
    run("scale", "decode=3", "--hold", "--no-wait")

    async def planned() -> None:
        from dynaplan.graph.lifecycle import Role
        from dynaplan.planner.kubernetes.connector import KubernetesConnector
        from dynaplan.planner.kubernetes.executor import Budget, Executor
        from dynaplan.planner.kubernetes.intent import IntentMap
        from dynaplan.planner.kubernetes.labelled_workloads import LabelledWorkloads

        client = api.client()
        budget = Budget(8, {Role.PREFILL: 1, Role.DECODE: 1})
        workloads, intents = LabelledWorkloads(client, "ns"), IntentMap(client, "ns")
        connector = KubernetesConnector(workloads, intents, budget, client=client, acts=False)
        assert (await connector.holds()).decode

        async def nothing(_: Any) -> None:
            pass

        await Executor(workloads, intents, budget, nothing).reconcile_once()
        await connector.close()

    asyncio.run(planned())
    assert api.objects[APPS, "deployments", "decode"]["spec"]["replicas"] == 3
