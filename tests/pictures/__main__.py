"""Makes the pictures of a running deployment in the documents: ``python -m tests.pictures DIRECTORY``.

A real deployment on 8 simulated GPUs is under a load that rises and falls. When it has scaled up a second
time, what its commands show on a terminal is drawn, and its page is pictured as on a desk, light and dark,
and as on a phone. The page of several models is pictured after it, a box that several people share, and who
asks it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.page import Page, headless
from tests.e2e.deployment import Deployment, dynaplan
from tests.fakes.polling import wait_until
from tests.pictures.models import pictured_models
from tests.pictures.people import pictured_people
from tests.pictures.shared_box import pictured_box
from tests.pictures.terminal import drawn

LOAD = ("--trace", "sinusoid:low=1,high=8,period=160,duration=600,isl=2000,osl=400", "--for", "10m")
FIRST_WAVE_S, SECOND_WAVE_S = 170.0, 120.0
LEAST_WORKERS = 6
"""Processes of the deployment at the height of the load: frontend, planner, and two of each role."""

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
COMMANDS = {
    "top": ("top",),
    "status-watch": ("status", "--watch"),
    "why": ("why", "--changes", "--last", "1"),
}
"""The pictures of terminals, by name, and the commands that they show."""


def main(directory: Path) -> None:
    options = [f"--Planner.{key}={value}" for key, value in PLANNER.items()]
    options.append("--VllmWorker.kv-total-tokens=16384")
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        deployment = Deployment(Path(place), "graphs.disagg:Frontend", "disagg.yaml", *options)
        load = None
        try:
            deployment.start()
            command = [dynaplan(), "bench", *LOAD]
            load = subprocess.Popen(command, env=deployment.environment, stderr=subprocess.DEVNULL)
            pictured(deployment, directory)
        finally:
            if load:
                load.terminate()
                load.wait(30)
            deployment.close()
    pictured_models(directory / "models-page.png")
    pictured_box(directory)
    pictured_people(directory)


def pictured(deployment: Deployment, directory: Path) -> None:
    with headless() as driver:
        page = Page(driver, deployment)
        page.open()
        time.sleep(FIRST_WAVE_S)
        wait_until(lambda: len(deployment.workers()) >= LEAST_WORKERS, SECOND_WAVE_S, 1.0)
        for command, words in COMMANDS.items():
            drawn(deployment, words, directory / f"{command}.svg")
        for name, (width, height, is_dark) in SIZES.items():
            page.open(width, height, is_dark=is_dark)
            wait_until(lambda: page.text("ttft").endswith("ms"))
            page.picture(directory / f"web-page{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
