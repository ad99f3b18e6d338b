"""The workers of a cluster as it scales them: one workload per role, read from the objects that have it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from dynaplan.contract.counts import WorkerCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import Object, Resource

GPU_SUFFIX = "/gpu"
"""End of the names of extended resources that are GPUs: ``nvidia.com/gpu``, ``amd.com/gpu``."""

MODEL_FLAGS = ("--served-model-name", "--model-name", "--model")
"""Flags of workers that name the model, the first one found first."""

CRASHING = ("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError")
"""Reasons for which a container waits that mean: it was tried, and is tried again later."""


@dataclass(frozen=True)
class Workload:
    """The workers of one role. ``replicas`` are asked for, ``ready`` as the object's status says.

    ``resource`` and ``target`` name the object whose ``scale`` subresource sets the number. ``gpus`` are
    those of one worker, 0 when not known; ``pods_of_one`` its pods, more than one when it spans nodes.
    ``pods`` are the ones that have not ended. ``has_costs``: its controller picks the pods that go by their
    deletion cost.
    """

    role: Role
    name: str
    resource: Resource
    target: str
    replicas: int
    ready: int = 0
    gpus: float = 0
    model: str = ""
    pods: tuple[Object, ...] = ()
    pods_of_one: int = 1
    has_costs: bool = False

    @property
    def terminating(self) -> int:
        """Workers whose pods are terminating."""
        return self._workers(sum(is_terminating(pod) for pod in self.pods))

    @property
    def holding(self) -> int:
        """Workers that hold GPUs, or are to: the ones asked for, any above that number, and the leaving."""
        live = self._workers(sum(not is_terminating(pod) for pod in self.pods))
        return max(self.replicas, live, self.ready) + self.terminating

    @property
    def is_settled(self) -> bool:
        """True when as many workers are ready as are asked for, and no other one is there but to leave."""
        live = self._workers(sum(not is_terminating(pod) for pod in self.pods))
        return self.ready == self.replicas and live <= self.replicas

    def counts(self) -> WorkerCounts:
        ready = min(self.ready, self.replicas)
        crashing = self._workers(sum(not is_terminating(pod) and _is_crashing(pod) for pod in self.pods))
        backoff = min(crashing, self.replicas - ready)
        return WorkerCounts(
            starting=self.replicas - ready - backoff,
            ready=ready,
            draining=self.holding - self.replicas,
            backoff=backoff,
            gpus=self.gpus,
            startup_s=max((_startup_s(pod) for pod in self.pods), default=0.0),
        )

    def _workers(self, pods: int) -> int:
        return math.ceil(pods / self.pods_of_one)


@dataclass(frozen=True)
class WorkloadView:
    """The workloads of a deployment at one moment; ``not_ready`` says why it must be left as it is."""

    workloads: tuple[Workload, ...]
    not_ready: str = ""

    def of(self, role: Role) -> Workload | None:
        """Return the role's workload; None when there is none."""
        return next((each for each in self.workloads if each.role is role), None)


class Workloads(Protocol):
    """The place of a deployment's workloads. Methods raise the errors of ``KubernetesClient``."""

    async def read(self) -> WorkloadView:
        """Return the workloads of the roles that there are; raises a PlannerError when none can be scaled."""
        ...

    async def scale(self, workload: Workload, replicas: int) -> None:
        """Ask for a number of workers."""
        ...


def value_at(document: Mapping[str, Any], *path: str) -> Any:
    """Return the value below a path of keys; None where a key is missing or has no mapping."""
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def integer_at(document: Mapping[str, Any], *path: str, otherwise: int = 0) -> int:
    """Return the whole number below a path of keys."""
    found = value_at(document, *path)
    return found if isinstance(found, int) else otherwise


def gpus_of_pod(template: Mapping[str, Any]) -> float:
    return sum(
        float(amount)
        for container in value_at(template, "spec", "containers") or ()
        for name, amount in (value_at(container, "resources", "limits") or {}).items()
        if name.endswith(GPU_SUFFIX)
    )


def model_of_pod(template: Mapping[str, Any]) -> str:
    """Return the model that the containers' command lines name, "" when none does."""
    for container in value_at(template, "spec", "containers") or ():
        words = (*(container.get("command") or ()), *(container.get("args") or ()))
        if model := model_of_command(words):
            return model
    return ""


def model_of_command(words: Sequence[Any]) -> str:
    """Return the model that a command line names; one of its words may be a line for a shell."""
    split = [part for word in words for part in _parts(str(word))]
    for flag in MODEL_FLAGS:
        for word, following in zip(split, [*split[1:], ""], strict=False):
            if word == flag and following:
                return following
            if word.startswith(f"{flag}="):
                return word.removeprefix(f"{flag}=")
    return ""


def is_terminating(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod is terminating."""
    return bool(value_at(pod, "metadata", "deletionTimestamp"))


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Tell whether all containers of a pod have ended: it holds no GPU."""
    return value_at(pod, "status", "phase") in ("Succeeded", "Failed")


def _is_crashing(pod: Mapping[str, Any]) -> bool:
    states = value_at(pod, "status", "containerStatuses") or ()
    return any(value_at(each, "state", "waiting", "reason") in CRASHING for each in states)


def _startup_s(pod: Mapping[str, Any]) -> float:
    """Return the seconds from a pod's creation to its being ready; 0 unless it is."""
    for condition in value_at(pod, "status", "conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") == "True":
            times = condition.get("lastTransitionTime"), value_at(pod, "metadata", "creationTimestamp")
            if all(times):
                ready, created = (datetime.fromisoformat(str(each)) for each in times)
                return max(0.0, (ready - created).total_seconds())
    return 0.0


def _parts(word: str) -> list[str]:
    if " " not in word.strip():
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()
