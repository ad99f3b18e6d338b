"""Deployments of several models on one simulated GPU, and what their logs say of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.e2e.deployment import Deployment


def serving(directory: Path, config: str) -> Deployment:
    """One simulated GPU, and the models of that file; not started."""
    file = directory / "models.yaml"
    file.write_text(config)
    return Deployment(directory, str(file), "", "--gpus", "1")


def log_of(deployment: Deployment, name: str) -> str:
    path = (
        deployment.directory
        / ".dynamo"
        / "logs"
        / deployment.namespace
        / f"{deployment.namespace}_{name}.log"
    )
    return path.read_text() if path.exists() else ""


def loads(deployment: Deployment) -> Counter[str]:
    """How often each model's worker was started."""
    return Counter(re.findall(r"start dynamo_([\w-]+?)(?:_\d+)?: ", log_of(deployment, "fleet")))


def misdirected(deployment: Deployment) -> list[str]:
    """The requests that were answered by another model's worker, by the frontend's access log."""
    answered = re.findall(r"model (\S+) at dynamo_(\S+?)(?:_\d+)?,", log_of(deployment, "Frontend"))
    assert answered, "the access log has no request"
    return [f"{model} by {worker}" for model, worker in answered if model != worker]
