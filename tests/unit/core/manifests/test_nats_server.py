"""The NATS server of its own asks for the token, and its pod goes on when nothing has changed."""

from __future__ import annotations

from dynaplan.core.manifests.nats_server import nats_documents
from tests.unit.core.manifests.deployments import deployment, found


def test_the_server_asks_for_the_token_of_the_secret() -> None:
    documents = nats_documents(deployment())
    assert "authorization { token: $NATS_AUTH_TOKEN }" in documents[0]["data"]["nats.conf"]
    pod = found(documents, "Deployment", "box-nats")["spec"]["template"]
    (token,) = pod["spec"]["containers"][0]["env"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "box-secret", "key": "nats-token"}}


def test_its_pod_starts_anew_with_another_token_for_those_that_call_it_have_that_one() -> None:
    annotations = [
        found(nats_documents(each), "Deployment", "box-nats")["spec"]["template"]["metadata"]["annotations"]
        for each in (deployment(), deployment(), deployment(secrets={"nats-token": "other"}))
    ]
    assert annotations[0] == annotations[1] != annotations[2]
