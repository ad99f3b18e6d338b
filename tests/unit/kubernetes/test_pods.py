"""The pods: what is in their environment, what is asked of them, and how long they may take to leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes import description
from dynaplan.kubernetes.description import PLANNER_PORT
from dynaplan.kubernetes.manifests import DYNAMO, SharedServices, VolumeMount, file_key, grace_s
from tests.unit.kubernetes.deployments import DECODE, FRONTEND, PLANNER, PREFILL, deployment, pod

CHECKSUM = "dynaplan.io/checksum"


def container(role: Role, **changes: Any) -> dict[str, Any]:
    (only,) = pod(deployment(**changes), role)["spec"]["containers"]
    return only


def variables(role: Role, **changes: Any) -> dict[str, str]:
    return {
        each["name"]: each.get("value") or next(iter(each["valueFrom"].values()), {}).get("key", "of the pod")
        for each in container(role, **changes)["env"]
        if each.get("value") != ""
    }


def test_each_service_runs_the_command_that_starts_it_alone() -> None:
    file = "/etc/dynaplan/graph/graph.yaml"
    assert [container(role)["args"] for role in (Role.FRONTEND, Role.DECODE, Role.PREFILL, Role.PLANNER)] == [
        ["frontend", "--namespace=box", "--host=0.0.0.0", "--port=8000", "-f", file],
        ["worker", "--namespace=box", "--role=decode", "-f", file, "--model=tiny"],
        ["worker", "--namespace=box", "--role=prefill", "-f", file, "--model=tiny"],
        ["planner", "--environment=kubernetes"],
    ]


def test_port_and_files_are_where_the_planners_flags_have_them() -> None:
    planner = container(Role.PLANNER)
    assert [port["containerPort"] for port in planner["ports"]] == [PLANNER_PORT]
    assert description.PLANNER_DIRECTORY in [mount["mountPath"] for mount in planner["volumeMounts"]]


def test_every_component_finds_the_servers_and_workers_have_a_port_that_probes_can_ask() -> None:
    decode = variables(Role.DECODE)
    assert decode["DYN_DISCOVERY_BACKEND"] == "nats"
    assert (decode["NATS_SERVER"], decode["NATS_AUTH_TOKEN"]) == ("nats://box-nats:4222", "nats-token")
    assert (decode["DYNAPLAN_ADVERTISE_HOST"], decode["DYNAPLAN_ADVERTISE_PORT"]) == ("of the pod", "8001")
    assert decode["DYNAPLAN_WORKER_TOKEN"] == "token"
    assert "DYNAPLAN_ADVERTISE_PORT" not in variables(Role.FRONTEND)


def test_the_planner_has_no_token_and_no_address_and_writes_its_decisions_where_it_may() -> None:
    planner = variables(Role.PLANNER)
    assert not {"DYNAPLAN_WORKER_TOKEN", "DYNAPLAN_ADVERTISE_HOST"} & planner.keys()
    assert planner["DYNAPLAN_LOG_DIR"] == "/var/lib/dynaplan/logs"


def test_without_nats_the_variable_is_there_and_empty_which_says_so() -> None:
    servers = SharedServices("etcd", etcd_url="http://etcd:2379")
    found = container(Role.DECODE, servers=servers)["env"]
    assert {"name": "NATS_SERVER", "value": ""} in found
    assert {"name": "ETCD_ENDPOINTS", "value": "http://etcd:2379"} in found
    assert "NATS_AUTH_TOKEN" not in [each["name"] for each in found]


def test_a_secret_variable_is_a_reference() -> None:
    (token,) = (each for each in container(Role.FRONTEND)["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "box-secret", "key": "frontend.HF_TOKEN"}}


@pytest.mark.parametrize(
    ("service", "seconds"), [(FRONTEND, 55), (DECODE, 630), (PREFILL, 630), (PLANNER, 30)]
)
def test_a_pod_may_take_its_drain_and_some_time_to_settle(service: object, seconds: int) -> None:
    assert grace_s(service) == seconds  # type: ignore[arg-type]


def test_a_worker_gets_its_gpus_and_requests_and_the_others_none() -> None:
    decode = container(Role.DECODE)
    assert decode["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    assert "resources" not in container(Role.FRONTEND)


def test_a_worker_that_starts_or_drains_is_not_ready_and_yet_alive() -> None:
    decode = container(Role.DECODE)
    asked = {name: decode[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert asked == {"livenessProbe": "/load_metrics", "readinessProbe": "/health"}
    frontend = container(Role.FRONTEND)
    assert frontend["livenessProbe"]["httpGet"]["path"] == "/live"


def test_a_frontend_goes_on_for_a_moment_when_it_is_to_leave() -> None:
    frontend = container(Role.FRONTEND)
    assert frontend["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert "lifecycle" not in container(Role.DECODE)


def test_only_the_planner_has_an_account_in_the_cluster() -> None:
    planner = pod(deployment(), Role.PLANNER)["spec"]
    assert (planner["serviceAccountName"], planner["automountServiceAccountToken"]) == ("box-planner", True)
    assert pod(deployment(), Role.DECODE)["spec"]["automountServiceAccountToken"] is False


def test_models_are_mounted_and_an_engine_gets_memory_to_share_unless_there_is_some() -> None:
    given = deployment(volumes=(VolumeMount("models", "/models"),))
    specs = [pod(given, Role.DECODE)["spec"], pod(given, Role.DECODE, DYNAMO)["spec"]]
    specs.append(pod(replace(given, services=(replace(DECODE, has_engine=False),)), Role.DECODE)["spec"])
    mounts = [[each["mountPath"] for each in spec["containers"][0]["volumeMounts"]] for spec in specs]
    paths = ["/var/lib/dynaplan", "/etc/dynaplan/graph", "/models"]
    assert mounts == [[*paths, "/dev/shm"], paths, paths]
    for spec in specs:
        mounted = [each["name"] for each in spec["containers"][0]["volumeMounts"]]
        assert mounted == [each["name"] for each in spec["volumes"]]


def test_a_planner_without_files_has_no_volume_for_them() -> None:
    volumes = pod(deployment(planner_files={}), Role.PLANNER)["spec"]["volumes"]
    assert [each["name"] for each in volumes] == ["state"]


@pytest.mark.parametrize(
    "changes", [{"config": "other"}, {"secrets": {"token": "u"}}, {"planner_files": {"a": b"b"}}]
)
def test_pods_start_anew_when_what_they_read_changes(changes: dict[str, object]) -> None:
    before, after = (pod(each, Role.DECODE) for each in (deployment(), deployment(**changes)))
    assert before["metadata"]["annotations"][CHECKSUM] != after["metadata"]["annotations"][CHECKSUM]


def test_a_path_becomes_a_key_that_a_config_map_may_have() -> None:
    assert file_key("profile/a b/raw.npz") == "profile__a_b__raw.npz"
