"""What objects of a cluster say of workers."""

from __future__ import annotations

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import Resource
from dynaplan.kubernetes.workloads import (
    Workload,
    WorkloadView,
    gpus_of_pod,
    model_of_command,
    model_of_pod,
    value_at,
)

DEPLOYMENTS = Resource("apps", "v1", "deployments")


def pod(*, leaving: bool = False, waiting: str = "") -> dict:
    states = [{"state": {"waiting": {"reason": waiting}}}] if waiting else []
    metadata = {"deletionTimestamp": "2026-11-22T12:00:00Z"} if leaving else {}
    return {"metadata": metadata, "status": {"containerStatuses": states}}


def workload(replicas: int, ready: int, *pods: dict, pods_of_one: int = 1) -> Workload:
    return Workload(
        Role.DECODE, "decode", DEPLOYMENTS, "decode", replicas, ready, pods=pods, pods_of_one=pods_of_one
    )


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["-m", "x", "--model", "tiny"], "tiny"),
        (["--model", "path", "--served-model-name", "tiny"], "tiny"),
        (["--model=path", "--model-name=tiny"], "tiny"),
        (["sh", "-c", "exec python -m x --model 'a b' --served-model-name tiny"], "tiny"),
        (["--model"], ""),
        (["echo 'unclosed --model tiny"], "tiny"),
        ([], ""),
    ],
)
def test_the_model_is_named_by_the_command_line_the_served_name_first(words, model):
    assert model_of_command(words) == model


def test_the_first_container_that_names_a_model_tells_it():
    containers = [{"args": ["proxy"]}, {"command": ["worker"], "args": ["--model", "tiny"]}]
    assert model_of_pod({"spec": {"containers": containers}}) == "tiny"
    assert model_of_pod({}) == ""


def test_gpus_of_all_containers_and_of_any_vendor_count():
    limits = [{"nvidia.com/gpu": "2", "cpu": "8"}, {"amd.com/gpu": 1}, None]
    containers = [{"resources": {"limits": each}} for each in limits]
    assert gpus_of_pod({"spec": {"containers": containers}}) == 3


def test_a_path_of_keys_that_is_not_there_is_none():
    assert value_at({"a": {"b": 1}}, "a", "b") == 1
    assert value_at({"a": 1}, "a", "b") is None


def test_workers_are_counted_by_state():
    counts = workload(4, 2, pod(), pod(), pod(), pod(waiting="CrashLoopBackOff"), pod(leaving=True)).counts()
    assert (counts.ready, counts.starting, counts.backoff, counts.draining) == (2, 1, 1, 1)


def test_ready_workers_above_the_number_asked_for_are_leaving():
    counts = workload(1, 3, pod(), pod(), pod()).counts()
    assert (counts.ready, counts.starting, counts.draining) == (1, 0, 2)


@pytest.mark.parametrize(
    ("found", "is_settled"),
    [
        (workload(2, 2, pod(), pod()), True),
        (workload(2, 1, pod(), pod()), False),
        (workload(1, 1, pod(), pod()), False),
        (workload(1, 1, pod(), pod(leaving=True)), True),
        (workload(0, 0), True),
        (workload(1, 1, pod(), pod(), pods_of_one=2), True),
    ],
)
def test_settled_is_as_many_ready_as_asked_for_and_the_others_leaving(found, is_settled):
    assert found.is_settled is is_settled


def test_a_workload_is_found_by_its_role():
    decode = workload(1, 1)
    assert WorkloadView((decode,)).of(Role.DECODE) is decode
    assert WorkloadView((decode,)).of(Role.PREFILL) is None
