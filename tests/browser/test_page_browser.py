"""The web page in Chromium: what it shows and does, by keys, on a phone, over a broken connection."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.browser.page import Page
from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys


def test_the_token_is_gone_from_the_address_and_nothing_is_complained_of(page: Page) -> None:
    assert page.driver.current_url == f"{page.deployment.url}/ui"
    assert "token" not in page.run("JSON.stringify(history.state) + document.referrer")
    assert page.run("document.cookie") == ""
    wait_until(lambda: page.all("#decisions li"))
    assert page.complaints() == []


def test_workers_load_and_charts_are_those_of_the_deployment(page: Page) -> None:
    names = page.each("#workers tbody td:first-child", "node.textContent")
    assert set(names) == set(page.deployment.workers())
    wait_until(lambda: page.text("ttft").endswith("ms"))
    drawn = {"requests", "decode", "ttft_ms"}
    wait_until(lambda: drawn <= set(page.each("#charts g", "node.dataset.key")))


def test_charts_are_read_by_keys(page: Page) -> None:
    charts = page.all("#charts")[0]
    charts.send_keys(Keys.END)
    wait_until(lambda: page.text("now").startswith("At "))
    before = charts.get_attribute("aria-valuenow")
    charts.send_keys(Keys.ARROW_LEFT)
    wait_until(lambda: charts.get_attribute("aria-valuenow") != before)
    assert charts.get_attribute("aria-valuetext")


def test_everything_that_acts_is_reached_by_the_tab_key_and_is_named(page: Page) -> None:
    page.run("document.body.focus()")
    buttons = [each for each in page.all("button") if each.is_displayed() and each.is_enabled()]
    assert buttons
    assert all(each.accessible_name for each in buttons)
    assert all(page.run("arguments[0].tabIndex", each) == 0 for each in buttons)


def test_a_button_scales_and_its_answer_is_shown(page: Page) -> None:
    page.button("One decode worker more").click()
    wait_until(lambda: "dynaplan scale decode=+1" in page.text("said-text"))
    wait_until(lambda: len(page.deployment.workers("VllmWorker")) == 2)
    wait_until(lambda: "dynamo_VllmWorker_1" in page.text("workers"))


def test_a_drain_is_asked_for_first(page: Page) -> None:
    page.button("Drain dynamo_VllmWorker").click()
    wait_until(lambda: "Drain dynamo_VllmWorker?" in page.text("ask-text"))
    page.button("No").click()
    assert not page.all("dialog[open]")


def test_a_log_is_shown_as_text_and_followed(page: Page) -> None:
    directory = page.deployment.statefile()["addresses"]["log_dir"]
    page.button("Log of dynamo_VllmWorker").click()
    wait_until(lambda: page.text("log-text"))
    with open(f"{directory}/dynamo_VllmWorker.log", "a") as log:
        log.write("<img src=x onerror=alert(1)><b>evil</b>\n")
    wait_until(lambda: "<b>evil</b>" in page.text("log-text"))
    assert not page.all("#log-text *")
    page.all("#log-text")[0].send_keys(Keys.ESCAPE)
    wait_until(lambda: not page.all("dialog[open]"))


def test_a_prompt_streams_its_answer(page: Page) -> None:
    page.all("#question")[0].send_keys("Why is the sky blue?", Keys.CONTROL, Keys.ENTER)
    wait_until(lambda: "TTFT" in page.text("pace"))
    assert len(page.text("answer")) > 20


def test_on_a_phone_nothing_sticks_out(page: Page) -> None:
    page.open(width=390, height=844)
    wait_until(lambda: page.run("document.querySelector('#charts svg').viewBox.baseVal.width") == 380)
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.all("#workers tbody tr")[0].is_displayed()


def test_dark_is_dark_and_light_is_light(page: Page) -> None:
    def brightness() -> int:
        colour = page.run("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)))

    assert brightness() > 600
    page.open(is_dark=True)
    assert brightness() < 150


def test_a_broken_connection_is_said_and_mended(page: Page, running: Deployment) -> None:
    os.kill(running.pid_of("dynamo_Frontend"), signal.SIGKILL)
    wait_until(lambda: "Connection lost" in page.text("connected"))
    wait_until(lambda: page.text("connected") == "Live")
    assert page.all("#charts svg")


def test_a_browser_that_is_not_signed_in_is_told_what_to_do(page: Page) -> None:
    page.driver.delete_all_cookies()
    page.driver.get(f"{page.deployment.url}/ui")
    assert "dynaplan ui" in page.driver.page_source
