"""The pictures of ``top`` and the page of a box that a script and a person share, each with a key."""

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

from tests.browser.page import Page, headless
from tests.e2e.deployment import MODEL, Deployment, dynaplan
from tests.fakes.keys import bearer, write_keys
from tests.fakes.polling import wait_until
from tests.pictures.terminal import drawn

KEYS = {
    "alice": {"admin": True},
    "nightly": {"priority": "low", "concurrency": 32, "requests-per-minute": 2000},
}
SCRIPT = ("--clients", "30", "--isl", "300", "--osl", "200", "--for", "5m")
PAUSE_S = 0.5
ASKED_S = 30.0
SIZE = 1240, 900


def pictured_people(directory: Path) -> None:
    """Serve, let both ask, and picture who asks."""
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        file = write_keys(Path(place) / "keys.yaml", KEYS)
        options = ("--gpus", "2", "--VllmWorker.max-num-seqs=8", "--api-keys", str(file))
        deployment = Deployment(Path(place), "graphs.agg:Frontend", "agg.yaml", *options)
        with deployment, _asking(deployment.start()):
            time.sleep(ASKED_S)
            drawn(deployment, ("top",), directory / "people-top.svg")
            with headless() as driver:
                page = Page(driver, deployment)
                page.open(*SIZE)
                wait_until(lambda: page.text("ttft").endswith("ms"))
                page.picture(directory / "people-page.png")


@contextmanager
def _asking(deployment: Deployment) -> Iterator[None]:
    """Let the script and the person ask, as long as the block lasts."""
    ended = threading.Event()
    person = threading.Thread(target=_ask, args=(deployment, ended))
    environment = {**deployment.environment, "DYNAPLAN_API_KEY": "sk-nightly"}
    command = [dynaplan(), "bench", *SCRIPT]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as script:
        person.start()
        try:
            yield
        finally:
            ended.set()
            person.join()
            script.terminate()


def _ask(deployment: Deployment, ended: threading.Event) -> None:
    """Ask one thing after the other until it ``ended``."""
    body = json.dumps({"model": MODEL, "prompt": "Why is the sky blue?", "max_tokens": 60}).encode()
    while not ended.wait(PAUSE_S):
        headers = {"Content-Type": "application/json", **bearer("alice")}
        asked = urllib.request.Request(f"{deployment.url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
