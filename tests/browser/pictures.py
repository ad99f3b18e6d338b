"""Makes the picture of the web page in the documents: ``python -m tests.browser.pictures DIRECTORY``.

A real deployment on 8 simulated GPUs is under load for three minutes; the page is then pictured as on a desk,
light and dark, and as on a phone. ``docs/images/web-page.png`` is the first of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.page import Page, headless
from tests.e2e.deployment import REPOSITORY, Deployment
from tests.fakes.polling import wait_until

LOAD_S = 180.0
SIZES = {"light": (1240, 1280, False), "dark": (1240, 1280, True), "phone": (390, 1700, False)}
PROFILE = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
PLANNER = {
    "policy": "sla",
    "profile-results-dir": PROFILE,
    "adjustment-interval": "10",
    "metric-pulling-interval": "1",
    "ttft": "400",
    "itl": "12",
}


def main(directory: Path) -> None:
    options = [f"--Planner.{key}={value}" for key, value in PLANNER.items()]
    options.append("--VllmWorker.kv-total-tokens=16384")
    with tempfile.TemporaryDirectory(prefix="dp-") as place:
        deployment = Deployment(
            Path(place),
            "graphs.disagg:Frontend",
            "disagg.yaml",
            *options,
        )
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
            page.picture(directory / f"web-page-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
