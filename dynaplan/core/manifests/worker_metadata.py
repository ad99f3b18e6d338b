"""The definition of ``DynamoWorkerMetadata``: the kind of object by which workers tell of themselves.

Names, scope and schema are those of NVIDIA Dynamo's CRD (ai-dynamo/dynamo, Apache-2.0), its descriptions left
out, so that it is the same object with Dynamo's operator and without it.
"""

from __future__ import annotations

from dynaplan.core.manifests.exported import Document

GROUP, VERSION, PLURAL, KIND = "nvidia.com", "v1alpha1", "dynamoworkermetadatas", "DynamoWorkerMetadata"


def worker_metadata_definition() -> Document:
    """Return the manifest by which a cluster knows ``DynamoWorkerMetadata``; it is applied once."""
    data = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {"type": "object", "required": ["data"], "properties": {"data": data}}
    texts = {name: {"type": "string"} for name in ("apiVersion", "kind")}
    properties = {**texts, "metadata": {"type": "object"}, "spec": spec}
    age = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": PLURAL.removesuffix("s"),
                "shortNames": ["dwm"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
                    "additionalPrinterColumns": [age],
                }
            ],
        },
    }
