"""The definition of DynamoWorkerMetadata is one that Kubernetes takes, and takes what workers write."""

from __future__ import annotations

from lightkube import codecs

from dynaplan.adapters.stores.kubernetes_kv.documents import PodIdentity, PodRecord, worker_metadata
from dynaplan.core.manifests.worker_metadata import worker_metadata_definition
from tests.unit.core.manifests.test_documents import fits


def test_it_fits_kubernetes_schema() -> None:
    document = worker_metadata_definition()
    assert codecs.from_dict(document).to_dict() == document


def test_what_a_worker_writes_fits_it() -> None:
    definition = worker_metadata_definition()["spec"]
    written = worker_metadata("worker-0", PodRecord(), None, PodIdentity("worker-0", "1-2-3"))
    (version,) = definition["versions"]
    assert fits(version["schema"]["openAPIV3Schema"], written)
    assert written["apiVersion"] == f"{definition['group']}/{version['name']}"
    assert written["kind"] == definition["names"]["kind"]
