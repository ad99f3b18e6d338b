"""The pods: what is in their environment, what is asked of them, and how long they may take to leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.core.manifests.exported import SharedServices, VolumeMount
from dynaplan.core.manifests.pods import CHECKSUM, environment, file_key, grace_s, pod_template
from tests.unit.core.manifests.deployments import DECODE, FRONTEND, PLANNER, PREFILL, deployment


def variables(name: str, **changes: object) -> dict[str, str]:
    service = {"frontend": FRONTEND, "decode": DECODE, "planner": PLANNER}[name]
    return {
        each["name"]: each.get("value") or next(iter(each["valueFrom"].values()), {}).get("key", "of the pod")
        for each in environment(deployment(**changes), service)
        if each.get("value") != ""
    }


def test_every_component_finds_the_servers_and_workers_have_a_port_that_probes_can_ask() -> None:
    decode = variables("decode")
    assert decode["DYN_DISCOVERY_BACKEND"] == "nats"
    assert (decode["NATS_SERVER"], decode["NATS_AUTH_TOKEN"]) == ("nats://box-nats:4222", "nats-token")
    assert (decode["DYNAPLAN_ADVERTISE_HOST"], decode["DYNAPLAN_ADVERTISE_PORT"]) == ("of the pod", "8001")
    assert decode["DYNAPLAN_WORKER_TOKEN"] == "token"
    assert "DYNAPLAN_ADVERTISE_PORT" not in variables("frontend")


def test_the_planner_has_no_token_and_no_address_and_writes_its_decisions_where_it_may() -> None:
    planner = variables("planner")
    assert not {"DYNAPLAN_WORKER_TOKEN", "DYNAPLAN_ADVERTISE_HOST"} & planner.keys()
    assert (planner["DYNAPLAN_LOG_DIR"], planner["TZ"]) == ("/var/lib/dynaplan/logs", "UTC")


def test_without_nats_the_variable_is_there_and_empty_which_says_so() -> None:
    servers = SharedServices("etcd", etcd_url="http://etcd:2379")
    found = environment(deployment(servers=servers), DECODE)
    assert {"name": "NATS_SERVER", "value": ""} in found
    assert {"name": "ETCD_ENDPOINTS", "value": "http://etcd:2379"} in found
    assert "NATS_AUTH_TOKEN" not in [each["name"] for each in found]


def test_a_secret_variable_is_a_reference() -> None:
    (token,) = (each for each in environment(deployment(), FRONTEND) if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "box-secret", "key": "frontend.HF_TOKEN"}}


@pytest.mark.parametrize(
    ("service", "seconds"), [(FRONTEND, 55), (DECODE, 630), (PREFILL, 630), (PLANNER, 30)]
)
def test_a_pod_may_take_its_drain_and_some_time_to_settle(service: object, seconds: int) -> None:
    assert grace_s(service) == seconds  # type: ignore[arg-type]


def test_a_worker_gets_its_gpus_and_requests_and_the_others_none() -> None:
    decode = pod_template(deployment(), DECODE)["spec"]["containers"][0]
    assert decode["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    assert "resources" not in pod_template(deployment(), FRONTEND)["spec"]["containers"][0]


def test_a_worker_that_starts_or_drains_is_not_ready_and_yet_alive() -> None:
    container = pod_template(deployment(), DECODE)["spec"]["containers"][0]
    asked = {name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert asked == {"livenessProbe": "/load_metrics", "readinessProbe": "/health"}
    frontend = pod_template(deployment(), FRONTEND)["spec"]["containers"][0]
    assert frontend["livenessProbe"]["httpGet"]["path"] == "/live"


def test_a_frontend_goes_on_for_a_moment_when_it_is_to_leave() -> None:
    frontend = pod_template(deployment(), FRONTEND)["spec"]["containers"][0]
    assert frontend["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert "lifecycle" not in pod_template(deployment(), DECODE)["spec"]["containers"][0]


def test_only_the_planner_has_an_account_in_the_cluster() -> None:
    planner = pod_template(deployment(), PLANNER)["spec"]
    assert (planner["serviceAccountName"], planner["automountServiceAccountToken"]) == ("box-planner", True)
    assert pod_template(deployment(), DECODE)["spec"]["automountServiceAccountToken"] is False


def test_models_are_mounted_and_an_engine_gets_memory_to_share_unless_there_is_some() -> None:
    given = deployment(volumes=(VolumeMount("models", "/models"),))
    mounts = [
        each["mountPath"] for each in pod_template(given, DECODE)["spec"]["containers"][0]["volumeMounts"]
    ]
    assert mounts == ["/var/lib/dynaplan", "/etc/dynaplan/graph", "/models", "/dev/shm"]
    there = pod_template(given, DECODE, has_shared_memory=True)["spec"]["containers"][0]["volumeMounts"]
    assert "/dev/shm" not in [each["mountPath"] for each in there]
    simulated = pod_template(given, replace(DECODE, has_engine=False))["spec"]["volumes"]
    assert "shared-memory" not in [each["name"] for each in simulated]


def test_a_planner_without_files_has_no_volume_for_them() -> None:
    volumes = pod_template(deployment(planner_files={}), PLANNER)["spec"]["volumes"]
    assert [each["name"] for each in volumes] == ["state"]


@pytest.mark.parametrize(
    "changes", [{"config": "other"}, {"secrets": {"token": "u"}}, {"planner_files": {"a": b"b"}}]
)
def test_pods_start_anew_when_what_they_read_changes(changes: dict[str, object]) -> None:
    before, after = (pod_template(each, DECODE) for each in (deployment(), deployment(**changes)))
    assert before["metadata"]["annotations"][CHECKSUM] != after["metadata"]["annotations"][CHECKSUM]


def test_a_path_becomes_a_key_that_a_config_map_may_have() -> None:
    assert file_key("profile/a b/raw.npz") == "profile__a_b__raw.npz"
