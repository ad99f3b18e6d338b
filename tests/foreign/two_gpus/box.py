"""``dynaplan serve`` on the box of two GPUs, and what its programs say of themselves."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.deployment import Deployment

HERE = Path(__file__).parent


def two_gpus(directory: Path, config: str, *options: str, name: str = "models.yaml") -> Deployment:
    """Return a deployment of that file on the box, not started; it has no state of another."""
    file, in_use = directory / name, directory / "gpus"
    in_use.mkdir()
    file.write_text(config)
    environment = {
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PATH": f"{HERE / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TWO_GPUS": str(in_use),
    }
    return Deployment(directory, str(file), "", *options, environment=environment)


def ask(deployment: Deployment, model: str) -> dict[str, Any]:
    """Ask the model; return what its program says of its words and GPUs."""
    body = {"model": model, "messages": [{"role": "user", "content": "how were you started?"}]}
    request = urllib.request.Request(
        f"{deployment.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    return dict(json.loads(said))


def models(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the models as ``dynaplan models --json`` has them, by name."""
    shown = deployment.run("models", "--json")
    assert shown.returncode == 0, shown.stderr
    return dict(json.loads(shown.stdout)["models"])
