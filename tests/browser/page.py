"""The page as a person has it: what is on it, what is pressed, what the browser complains of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))


@contextmanager
def headless() -> Iterator[Any]:
    """A browser without a window, inside a ``with`` block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER or ""))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """One deployment's page in a browser (selenium's driver)."""

    def __init__(self, driver: Any, deployment: Deployment) -> None:
        self.driver = driver
        self.deployment = deployment

    def open(self, width: int = 1400, height: int = 1000, *, is_dark: bool = False) -> None:
        """Open the address that ``dynaplan ui`` prints; return when the page is live and has its charts."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get(self.deployment.run("ui").stdout.strip())
        wait_until(lambda: self.text("connected") == "Live")
        wait_until(lambda: self.all("#charts svg"))

    def text(self, name: str) -> str:
        return str(self.driver.find_element("id", name).text)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def button(self, label: str) -> Any:
        """The button of that name, as a screen reader has it."""
        return next(each for each in self.all("button") if each.accessible_name == label)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def each(self, selector: str, expression: str) -> list[Any]:
        """The value of a script's expression of each ``node`` of that selector, all at one moment."""
        return list(
            self.run(f"[...document.querySelectorAll(arguments[0])].map((node) => {expression})", selector)
        )

    def complaints(self) -> list[str]:
        """What the browser has logged: errors, and what the Content-Security-Policy forbade."""
        messages = [each["message"] for each in self.driver.get_log("browser")]
        return [each for each in messages if "/favicon.ico" not in each]

    def picture(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))
