"""Makes the pictures of a running deployment in the documents: ``python -m tests.pictures DIRECTORY``.

A real deployment on 8 simulated GPUs is under load for three minutes. Then what its commands show on a
terminal is drawn, and its page is pictured as on a desk, light and dark, and as on a phone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.page import Page, headless
from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan
from tests.fakes.polling import wait_until
from tests.pictures.terminal import Terminal

LOAD_S = 180.0
SIZES = {"": (1240, 1280, False), "-dark": (1240, 1280, True), "-phone": (390, 1700, False)}
PROFILE = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
PLANNER = {
    "policy": "sla",
    "profile-results-dir": PROFILE,
    "adjustment-interval": "10",
    "metric-pulling-interval": "1",
    "ttft": "400",
    "itl": "12",
}
COMMANDS = {"top": ("top",), "status-watch": ("status", "--watch"), "why": ("why", "--changes", "--last", "1")}
"""The pictures of terminals, by name, and the commands that they show."""

FEW_WORDS_LATER_S = 3.0
"""Time in which a live command has looked twice, so that it shows rates."""


def main(directory: Path) -> None:
    options = [f"--Planner.{key}={value}" for key, value in PLANNER.items()]
    options.append("--VllmWorker.kv-total-tokens=16384")
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        deployment = Deployment(Path(place), "graphs.disagg:Frontend", "disagg.yaml", *options)
        load = None
        try:
            deployment.start()
            command = [sys.executable, "-m", "tests.browser.load", deployment.url, "3"]
            load = subprocess.Popen(command, cwd=REPOSITORY)
            pictured(deployment, directory)
        finally:
            if load:
                load.terminate()
                load.wait(30)
            deployment.close()


def pictured(deployment: Deployment, directory: Path) -> None:
    with headless() as driver:
        page = Page(driver, deployment)
        page.open()
        time.sleep(LOAD_S)
        for name, (width, height, is_dark) in SIZES.items():
            page.open(width, height, is_dark=is_dark)
            wait_until(lambda: page.text("ttft").endswith("ms"))
            page.picture(directory / f"web-page{name}.png")
    for name, words in COMMANDS.items():
        drawn(deployment, words, directory / f"{name}.svg")


def drawn(deployment: Deployment, words: tuple[str, ...], path: Path) -> None:
    """Draw what the command shows on a terminal: at its end, or when it has been live for some seconds."""
    with Terminal([dynaplan(), *words], deployment.environment, deployment.directory) as terminal:
        terminal.look(FEW_WORDS_LATER_S if words[0] != "why" else 60.0)
        if words == ("top",):
            terminal.type("jjj")
            terminal.look(FEW_WORDS_LATER_S)
        path.write_text(terminal.svg(f"$ dynaplan {' '.join(words)}", str(deployment.directory)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
