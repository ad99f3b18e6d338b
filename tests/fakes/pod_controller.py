"""A cluster's controllers and kubelets, one pass at a time, over a ``KubeApi``.

Copies: a Deployment's controller makes the pods that are missing and deletes those that are too many, the
lower ``pod-deletion-cost`` first, then the newest; the kubelet makes a new pod ready; a pod that is deleted
stays, with its ``deletionTimestamp``, until it has drained; a Deployment's status follows. Left out:
ReplicaSets, scheduling, probes, grace periods that end.
"""

from __future__ import annotations

from tests.fakes.kube_api import KubeApi, Object

APPS, CORE = "/apis/apps/v1", "/api/v1"
COST = "controller.kubernetes.io/pod-deletion-cost"
CREATED, READY = "2026-11-22T12:00:00Z", "2026-11-22T12:00:42Z"


class PodController:
    """``is_draining``: pods that are deleted stay until ``drained``."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.is_draining = False
        self._made = 0

    def add_deployment(self, role: str, replicas: int, *, gpus: int = 1, model: str = "tiny") -> None:
        """Label and add a Deployment, and its pods, ready."""
        labels = {"dynaplan.io/role": role}
        container = {
            "name": "main",
            "args": ["worker", "--model", model],
            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        }
        template = {"metadata": {"labels": {"app": role}}, "spec": {"containers": [container]}}
        self.api.add(
            APPS,
            "deployments",
            {
                "metadata": {"name": role, "labels": labels},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": {"app": role}},
                    "template": template,
                },
                "status": {},
            },
        )
        self.act()

    def set_model(self, name: str, model: str) -> None:
        """Name another model on the command line."""
        found = self.api.objects[APPS, "deployments", name]
        found["spec"]["template"]["spec"]["containers"][0]["args"] = ["worker", "--model", model]

    def act(self) -> None:
        """Do what the controllers and kubelets do next."""
        for (api, plural, name), found in list(self.api.objects.items()):
            if (api, plural) == (APPS, "deployments"):
                self._scale(name, found["spec"]["replicas"])
                ready = len(self.pods(name))
                self.api.change(
                    APPS,
                    "deployments",
                    name,
                    status={
                        "replicas": ready,
                        "readyReplicas": ready,
                        "updatedReplicas": ready,
                        "observedGeneration": found["metadata"]["generation"],
                    },
                )

    def pods(self, app: str, *, leaving: bool = False) -> list[Object]:
        """The pods of a Deployment; those that are leaving, or the others."""
        found = [
            each
            for (_, plural, _), each in self.api.objects.items()
            if plural == "pods" and each["metadata"]["labels"]["app"] == app
        ]
        return [pod for pod in found if bool(pod["metadata"].get("deletionTimestamp")) is leaving]

    def drained(self, app: str) -> None:
        """Let the pods that leave end."""
        for pod in self.pods(app, leaving=True):
            self.api.remove(CORE, "pods", pod["metadata"]["name"])

    def _scale(self, app: str, replicas: int) -> None:
        there = self.pods(app)
        for _ in range(replicas - len(there)):
            self._made += 1
            pod = {
                "metadata": {
                    "name": f"{app}-{self._made}",
                    "labels": {"app": app},
                    "creationTimestamp": CREATED,
                },
                "status": {
                    "phase": "Running",
                    "podIP": f"10.0.0.{self._made}",
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": READY}],
                },
            }
            self.api.add(CORE, "pods", pod)
        by_cost = sorted(there, key=lambda pod: (_cost(pod), -_number(pod)))
        for pod in by_cost[: max(0, len(there) - replicas)]:
            name = pod["metadata"]["name"]
            if self.is_draining:
                self.api.change(CORE, "pods", name, metadata={"deletionTimestamp": READY})
            else:
                self.api.remove(CORE, "pods", name)


def _cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(COST, "0"))


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rsplit("-", 1)[1])
