"""A cluster without kubelets: its API server in memory; what controllers write is written by a test."""

from __future__ import annotations

from dynaplan.kubernetes.store import ClusterStore
from dynaplan.kubernetes.store_documents import PodIdentity
from tests.fakes.kube_api import KubeApi, Object

RECORDS, DISCOVERY = "/apis/nvidia.com/v1alpha1", "/apis/discovery.k8s.io/v1"


def cluster() -> KubeApi:
    """An API server that keeps watches open, as the real one does."""
    api = KubeApi()
    api.holds_watches = True
    return api


def store_of(api: KubeApi, pod: str) -> ClusterStore:
    return ClusterStore(api.client(), PodIdentity(pod, f"uid-of-{pod}") if pod else None)


def endpoint(pod: str, ready: bool | None) -> Object:
    """An endpoint as the EndpointSlice controller writes it."""
    conditions = {} if ready is None else {"ready": ready}
    target = {"kind": "Pod", "name": pod, "namespace": "default"}
    return {"addresses": ["10.0.0.7"], "conditions": conditions, "targetRef": target}


def slice_of(**pods: bool | None) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "workers-x7k2p"},
        "addressType": "IPv4",
        "endpoints": [endpoint(name.replace("_", "-"), ready) for name, ready in pods.items()],
    }


def set_ready(api: KubeApi, **pods: bool | None) -> None:
    """Have one EndpointSlice name these pods, and no others."""
    document = slice_of(**pods)
    place = DISCOVERY, "endpointslices", "workers-x7k2p"
    if place in api.objects:
        api.change(*place, endpoints=document["endpoints"])
    else:
        api.add(DISCOVERY, "endpointslices", document)


def delete_pod(api: KubeApi, pod: str) -> None:
    """Delete what the pod owned, as the garbage collector does."""
    for (group, plural, name), found in list(api.objects.items()):
        if any(owner["name"] == pod for owner in found["metadata"].get("ownerReferences", ())):
            api.remove(group, plural, name)
