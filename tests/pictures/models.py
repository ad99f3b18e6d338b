"""The picture of a page of three models that share a GPU: they are asked in turn, so that they swap."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from tests.browser.page import Page, headless
from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

CONFIG = """
Common: {engine: sim, startup-time: 4}
Models:
  coder: {memory: 40GiB}
  writer: {memory: 30GiB}
  helper: {memory: 8GiB, pin: true}
"""

ASKED_S = 240.0
"""How long the models are asked."""

PERIOD_S = 40.0
"""Seconds after which most requests are for the other one of two models that do not fit beside a third."""

CLIENTS = 6
SIZE = 1240, 1180


def pictured_models(path: Path) -> None:
    """Serve the models, ask them, and picture the page."""
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        file = Path(place) / "models.yaml"
        file.write_text(CONFIG)
        deployment = Deployment(Path(place), str(file), "", "--gpus", "1", "--model-memory", "60GiB")
        ended = threading.Event()
        clients = [
            threading.Thread(target=_ask, args=(deployment, number, ended)) for number in range(CLIENTS)
        ]
        try:
            deployment.start()
            for client in clients:
                client.start()
            with headless() as driver:
                page = Page(driver, deployment)
                page.open(*SIZE)
                time.sleep(ASKED_S)
                wait_until(lambda: page.text("ttft").endswith("ms"))
                page.picture(path)
        finally:
            ended.set()
            for client in clients:
                if client.ident:
                    client.join()
            deployment.close()


def _ask(deployment: Deployment, number: int, ended: threading.Event) -> None:
    """Ask the small model, or the large one whose time it is, until it ``ended``."""
    url = f"{deployment.url}/v1/chat/completions"
    while not ended.is_set():
        is_first = time.monotonic() % (2 * PERIOD_S) < PERIOD_S
        model = "helper" if number == 0 else "coder" if is_first else "writer"
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": model, "stream": True, "max_tokens": 60, "messages": question}).encode()
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
        ended.wait(0.2 * number)
