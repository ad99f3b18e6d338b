"""A deployment on simulated GPUs, and headless Chromium that its page is open in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, DRIVER, Page, headless
from tests.e2e.deployment import REPOSITORY, Deployment


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A small deployment under load that plans every five seconds."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = ("--Planner.adjustment-interval=5", "--Planner.metric-pulling-interval=1")
    deployment = Deployment(
        tmp_path_factory.mktemp("page"), "graphs.disagg:Frontend", "disagg.yaml", *options
    )
    load = None
    try:
        deployment.start()
        command = [sys.executable, "-m", "tests.browser.load", deployment.url]
        load = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ)
        yield deployment
    finally:
        if load:
            load.send_signal(signal.SIGTERM)
            load.wait(30)
        deployment.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser, without a window."""
    with headless() as driver:
        yield driver


@pytest.fixture
def page(running: Deployment, browser: Any, tmp_path: Path) -> Page:
    """The page, opened by its address and seen to be live."""
    opened = Page(browser, running)
    opened.open()
    return opened
