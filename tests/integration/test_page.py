"""The web page over loopback sockets: who gets in, what is refused, what is shown and done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.contract.page_access import cookie_name, new_session, page_token, session_key
from dynaplan.webui import routes
from tests.fakes.openai_worker import MODEL, TOKEN
from tests.fakes.page import SILENT, Browser, page
from tests.fakes.polling import PATIENCE_S, eventually

ALL_PATHS = ("", "/", "/ui.js", "/charts.js", "/ui.css", "/events", "/charts.svg", "/log?worker=w", "/none")
ACTION = {"do": "scale", "role": "decode", "by": 1}


@pytest.fixture
async def browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Browser]:
    async with page(monkeypatch, tmp_path) as here:
        await here.sign_in()
        yield here


def stranger(browser: Browser) -> Browser:
    """Another browser at the same frontend."""
    return Browser(browser.here)


# -- getting in ----------------------------------------------------------------------------------


async def test_the_token_opens_a_session_and_leaves_the_address(browser: Browser) -> None:
    response = await stranger(browser).sign_in()
    assert response.status == 303
    path, _, key = response.headers["Location"].partition("#")
    assert path == "/ui"
    assert page_token(TOKEN) not in response.headers["Location"]
    cookie = response.headers["Set-Cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/ui", "Max-Age="))
    assert key
    assert key not in cookie


async def test_from_another_site_the_address_is_left_without_a_redirect(browser: Browser) -> None:
    new = stranger(browser)
    response = await new.get(f"/ui?token={page_token(TOKEN)}", Sec_Fetch_Site="cross-site")
    assert response.status == 200
    assert response.headers["Refresh"].startswith("0; url=/ui#")
    assert "Set-Cookie" in response.headers


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_without_a_session_nothing_is_shown(browser: Browser, path: str) -> None:
    response = await stranger(browser).get(f"/ui{path}")
    assert response.status == 401
    assert "dynaplan ui" in await response.text()


@pytest.mark.parametrize("token", ["", "x", page_token("another"), TOKEN], ids=str)
async def test_a_wrong_token_opens_nothing(browser: Browser, token: str) -> None:
    response = await stranger(browser).sign_in(token)
    assert response.status == 401
    assert "Set-Cookie" not in response.headers


@pytest.mark.parametrize("path", ["/events", "/charts.svg", "/log?worker=w"])
async def test_a_cookie_without_its_key_shows_nothing_of_the_deployment(browser: Browser, path: str) -> None:
    """Browsers send cookies to every port of a host, which another user may listen on."""
    thief = Browser(browser.here, cookies=browser.cookies)
    assert (await thief.get(f"/ui{path}")).status == 401
    thief.key = page_token(TOKEN)
    assert (await thief.get(f"/ui{path}")).status == 401


async def test_a_key_without_its_cookie_shows_nothing(browser: Browser) -> None:
    assert (await Browser(browser.here, key=browser.key).get("/ui/charts.svg")).status == 401


async def test_a_session_whose_time_is_over_is_none(browser: Browser) -> None:
    old = new_session(TOKEN, 0.0, "n")
    late = Browser(browser.here, {cookie_name(TOKEN): old}, session_key(TOKEN, old))
    assert (await late.get("/ui")).status == 401


@pytest.mark.parametrize("cookie", ["a=b", "=", '"', f"{cookie_name(TOKEN)}=", "\x80"], ids=ascii)
async def test_a_cookie_that_is_none_is_refused(browser: Browser, cookie: str) -> None:
    assert (await stranger(browser).get("/ui", Cookie=cookie)).status == 401


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "["])
async def test_a_name_that_is_not_this_machines_is_refused(browser: Browser, host: str) -> None:
    assert (await browser.get("/ui", Host=host)).status == 421
    assert (await browser.get(f"/ui?token={page_token(TOKEN)}", Host=host)).status == 421


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:9000", "page.localhost", "10.0.0.7"])
async def test_addresses_and_localhost_are_let_in_as_through_a_tunnel(browser: Browser, host: str) -> None:
    assert (await browser.get("/ui", Host=host)).status == 200


async def test_a_frontend_without_page_has_no_such_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with page(monkeypatch, tmp_path, page=False) as here:
        assert (await here.sign_in()).status == 404


async def test_a_frontend_that_no_serve_started_has_no_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with page(monkeypatch, tmp_path) as there:
        runtime, settings = there.here.frontend._runtime, there.here.frontend._settings
        assert routes.make_page(runtime, settings, there.here.frontend._routes.handle)
        monkeypatch.delenv("DYNAPLAN_STATEFILE")
        assert routes.make_page(runtime, settings, there.here.frontend._routes.handle) is None


# -- what every answer says ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/ui.js", "/charts.svg?span=1", "/none", "/log?worker=none"])
async def test_every_answer_forbids_what_the_page_does_not_need(browser: Browser, path: str) -> None:
    for each in (browser, stranger(browser)):
        headers = (await each.get(f"/ui{path}")).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


async def test_the_page_itself_holds_nothing_of_the_deployment_and_no_script(browser: Browser) -> None:
    text = await (await browser.get("/ui")).text()
    assert "<script>" not in text
    assert "style=" not in text
    assert " on" not in "".join(part.partition(">")[0] for part in text.split("<script")[1:])
    for secret in (TOKEN, page_token(TOKEN), browser.key, *browser.cookies.values()):
        assert secret not in text


async def test_the_scripts_make_text_of_everything(browser: Browser) -> None:
    for name in ("ui.js", "charts.js"):
        script = await (await browser.get(f"/ui/{name}")).text()
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
            assert sink not in script


# -- what is shown -------------------------------------------------------------------------------


async def test_open_pages_share_one_process_which_ends_after_them(browser: Browser) -> None:
    clients = browser.here.frontend._page._clients
    clients._linger_s = 0.0
    one, other = [await browser.get(f"/ui/events?span={span}") for span in (900, 3600)]
    seen = await until(one, "event: charts", "[[900, 1000], [3600, 1000]]")
    assert "event: look\ndata: {}" in seen
    assert "<svg>" not in seen
    assert await (await browser.get("/ui/charts.svg?span=900")).text() == "<svg>900</svg>"
    assert (await browser.get("/ui/charts.svg?span=21600")).status == 404
    assert "event: charts" not in await until(other, "asked")
    pid = clients._feed.pid
    one.close()
    other.close()
    await eventually(lambda: not psutil.pid_exists(pid) and not clients._clients)


async def test_a_process_that_ends_is_said_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with page(monkeypatch, tmp_path, SILENT) as here:
        await here.sign_in()
        here.here.frontend._page._clients._retry_s = 0.0
        response = await here.get("/ui/events")
        assert "has ended" in await until(response, "event: trouble")
        assert "has ended" in await until(response, "event: trouble")
        response.close()


async def test_a_frontend_that_drains_ends_its_pages_and_their_process(browser: Browser) -> None:
    response = await browser.get("/ui/events")
    await until(response, "look")
    pid = browser.here.frontend._page._clients._feed.pid
    await browser.here.frontend.drain()
    assert await response.content.read() is not None
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("query", ["span=x", "width=x"])
async def test_charts_of_no_size_are_refused(browser: Browser, query: str) -> None:
    assert (await browser.get(f"/ui/events?{query}")).status == 400


async def test_a_log_is_followed_by_its_bytes(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "w.log").write_text("<b>one</b>\n")
    first = await (await browser.get("/ui/log?worker=w")).json()
    assert first == {"text": "<b>one</b>\n", "after": 11}
    assert (await browser.get("/ui/log?worker=../w")).status == 404
    assert (await browser.get("/ui/log?worker=w&after=x")).status == 400


async def until(response: Any, *marks: str) -> str:
    """What was streamed until all of the marks had come."""
    text = ""
    async with asyncio.timeout(PATIENCE_S):
        while not all(mark in text for mark in marks):
            text += (await response.content.readany()).decode()
    return text


# -- what is done --------------------------------------------------------------------------------


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the page has run; none of them does anything."""
    run: list[list[str]] = []

    async def call(arguments: list[str]) -> str:
        run.append(list(arguments))
        return "<b>done</b>"

    monkeypatch.setattr(routes, "run_command", call)
    return run


async def test_an_action_is_a_command_and_its_answer_what_that_printed(
    browser: Browser, commands: list[list[str]]
) -> None:
    response = await browser.post("/ui/act", ACTION)
    assert await response.json() == {
        "command": "dynaplan scale decode=+1 --no-wait",
        "output": "<b>done</b>",
    }
    assert commands == [["scale", "decode=+1", "--no-wait", "--namespace", "ns"]]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"X_Dynaplan_Key": ""}, 401),
        ({"X_Dynaplan_Key": "x"}, 401),
        ({"Cookie": ""}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Content_Type": "text/plain"}, 415),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/ui/act", "/ui/prompt"])
async def test_an_action_from_elsewhere_does_nothing(
    browser: Browser, commands: list[list[str]], path: str, headers: dict[str, str], status: int
) -> None:
    response = await browser.post(path, ACTION, **headers)
    assert response.status == status
    assert commands == []


@pytest.mark.parametrize("body", [{}, [], "x", {"do": "stop"}, {"do": "scale", "role": "--help", "by": 1}])
async def test_what_is_no_action_runs_no_command(
    browser: Browser, commands: list[list[str]], body: Any
) -> None:
    assert (await browser.post("/ui/act", body)).status == 400
    assert commands == []


async def test_an_action_is_short(browser: Browser, commands: list[list[str]]) -> None:
    assert (await browser.post("/ui/act", {"do": "x" * 5000})).status == 413
    assert commands == []


async def test_a_prompt_is_answered_as_any_clients_with_the_key_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with page(monkeypatch, tmp_path, api_key="sk") as here:
        await here.sign_in()
        worker = await here.here.worker()
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        response = await here.post("/ui/prompt", body)
        text = await response.text()
        assert response.status == 200
        assert text.endswith("data: [DONE]\n\n")
        assert worker.bodies[0]["messages"] == body["messages"]
        assert await here.here.sample("dynamo_frontend_requests_total") == 1


async def test_a_prompt_that_fails_says_why_as_the_api_does(browser: Browser) -> None:
    response = await browser.post("/ui/prompt", {"model": "none", "messages": []})
    assert "error" in json.loads(await response.text())
