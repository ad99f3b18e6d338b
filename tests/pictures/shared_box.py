"""Pictures of a shared box: two models, a GPU that is lent, one that is ill, and the watts of all."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynaplan.util.amounts import GIB
from tests.browser.page import Page, headless
from tests.e2e.deployment import Deployment, dynaplan
from tests.fakes.polling import wait_until
from tests.pictures.terminal import drawn

CONFIG = """
Common: {engine: sim, startup-time: 1}
Models:
  coder: {memory: 60GiB, preload: true}
  writer: {memory: 40GiB, preload: true}
"""

DRIVER: dict[int, dict[str, Any]] = {
    0: {"used_bytes": 40 * GIB, "utilisation": 0.31, "watts": 214, "celsius": 51},
    1: {"used_bytes": 60 * GIB, "utilisation": 0.92, "watts": 487, "celsius": 64},
    2: {"used_bytes": 0, "utilisation": 0.0, "watts": 71, "celsius": 38, "xids": [79]},
    3: {"used_bytes": 22 * GIB, "utilisation": 0.97, "watts": 493, "celsius": 66},
}
"""What the simulated driver says of the GPUs once the models are there and one GPU is lent."""

OPTIONS = ("--gpus", "4", "--power-cap", "500W")
CLIENTS = "coder", "coder", "coder", "writer"
ASKED_S, SIZE = 75.0, (1240, 1180)


def pictured_box(directory: Path) -> None:
    """Draw `gpus`, `top` and the page of a box that several share."""
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        file = Path(place) / "models.yaml"
        file.write_text(CONFIG)
        with (
            Deployment(Path(place), str(file), "", *OPTIONS) as deployment,
            _lent(deployment),
            _asked(deployment),
        ):
            for gpu, said in DRIVER.items():
                (Path(place) / "node" / f"gpu-{gpu}.json").write_text(json.dumps(said))
            time.sleep(ASKED_S)
            drawn(deployment, ("gpus",), directory / "gpus.svg")
            drawn(deployment, ("top",), directory / "shared-box-top.svg")
            with headless() as driver:
                page = Page(driver, deployment)
                page.open(*SIZE)
                wait_until(lambda: page.text("ttft").endswith("ms"))
                page.picture(directory / "shared-box-page.png")


@contextmanager
def _lent(deployment: Deployment) -> Iterator[None]:
    """Start the deployment, and a program that a GPU is lent to."""
    deployment.start()
    wait_until(lambda: len(deployment.workers()) >= 3)
    program = [dynaplan(), "run", "--", "sleep", "600"]
    with subprocess.Popen(program, env=deployment.environment, cwd=deployment.directory) as lent:
        wait_until(lambda: "sleep 600" in deployment.run("gpus").stdout)
        yield
        lent.terminate()


@contextmanager
def _asked(deployment: Deployment) -> Iterator[None]:
    """Have clients ask the two models."""
    ended = threading.Event()
    clients = [threading.Thread(target=_ask, args=(deployment, model, ended)) for model in CLIENTS]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join()


def _ask(deployment: Deployment, model: str, ended: threading.Event) -> None:
    """Ask the model again and again until it ``ended``."""
    while not ended.is_set():
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": model, "stream": True, "max_tokens": 200, "messages": question})
        url = f"{deployment.url}/v1/chat/completions"
        asked = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
        ended.wait(0.3)
