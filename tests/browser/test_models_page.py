"""The web page of a deployment whose models are loaded on request, in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, DRIVER, Page, headless
from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

pytest.importorskip("selenium")

EVIL = "<b>bee</b><img src=x onerror=alert(1)>"
"""A name that is markup, and has to be shown as the text that it is."""

CONFIG = f"""
Common: {{engine: sim, memory: 50GB, startup-time: 0.3}}
Models:
  ant: {{max-workers: 2, Planner: {{adjustment-interval: 1}}}}
  "{EVIL}": {{}}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    directory = tmp_path_factory.mktemp("page")
    file = directory / "models.yaml"
    file.write_text(CONFIG)
    with Deployment(directory, str(file), "", "--gpus", "1") as deployment:
        deployment.start()
        with headless() as driver:
            opened = Page(driver, deployment)
            opened.open()
            yield opened


def cells(page: Page, name: str) -> dict[str, str]:
    """What is shown of that model, by the heading."""
    rows: list[Any] = page.each("#models tbody tr", "[...node.children].map((cell) => cell.textContent)")
    row = next(each for each in rows if each[0] == name)
    headings = page.each("#models thead th", "node.textContent")
    return dict(zip(headings, row, strict=True))


def test_a_name_that_is_markup_is_shown_as_text(page: Page) -> None:
    wait_until(lambda: len(page.all("#models tbody tr")) == 2)
    assert cells(page, EVIL)["State"] == "unloaded"
    assert page.each("#model option", "node.textContent") == ["ant", EVIL]
    page.button(f"Load {EVIL}").click()
    wait_until(lambda: cells(page, EVIL)["State"] == "ready")
    wait_until(lambda: f"dynaplan load {EVIL}" in page.text("said-text"))
    assert page.all("#models b, #models img, #said b, #said img, #model b, #model img, #notes img") == []
    assert page.complaints() == []


def test_a_prompt_goes_to_the_model_that_is_chosen_and_loads_it(page: Page) -> None:
    page.button("Close").click()  # of what the last button said, which covers this one
    page.run("document.querySelector('#model').value = 'ant'")
    page.button("Send").click()
    wait_until(lambda: "TTFT" in page.text("pace"))
    wait_until(lambda: cells(page, "ant")["State"] == "ready")
    assert cells(page, "ant")["Workers"] == "1 of 2"
    wait_until(lambda: cells(page, EVIL)["State"] == "unloaded")


def test_the_planner_of_a_model_is_in_the_header_and_its_decisions_are_listed(page: Page) -> None:
    assert "policy load for ant" in page.text("service")
    wait_until(
        lambda: any(
            each.startswith("ant: policy load") for each in page.each("#planners li", "node.textContent")
        )
    )
    decided = "[...node.querySelectorAll('summary')].map((each) => each.textContent)"
    wait_until(lambda: any("ant: no change (" in each for each in page.each("#decisions", decided)[0]))


def test_a_model_is_pinned_and_unpinned_and_its_unload_is_asked_for_first(page: Page) -> None:
    page.button("Pin ant").click()
    wait_until(lambda: cells(page, "ant")["Leaves"] == "pinned")
    page.button("Unpin ant").click()
    wait_until(lambda: cells(page, "ant")["Leaves"] != "pinned")
    page.button("Unload ant").click()
    wait_until(lambda: "Unload ant?" in page.text("ask-text"))
    page.button("Yes").click()
    wait_until(lambda: cells(page, "ant")["State"] == "unloaded")


def test_on_a_phone_no_model_sticks_out(page: Page) -> None:
    page.open(width=390, height=844)
    wait_until(lambda: page.all("#models tbody tr"))
    assert page.run("document.documentElement.scrollWidth") <= 390
