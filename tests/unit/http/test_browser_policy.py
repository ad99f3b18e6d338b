"""Which requests of web browsers are answered. Headers are as Chromium 140 and Firefox 140 send them."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.http.browser_policy import BrowserPolicy, HostNames, is_preflight, readable_headers

BOX = HostNames(["127.0.0.1", "Box"])
LOOPBACK = BrowserPolicy(BOX, ["https://chat.example", "https://*.team.example:8443", "chrome-extension://*"])
OPEN = BrowserPolicy(None)
KEYED = BrowserPolicy(BOX, has_key=True)

LOCAL = {"Host": "127.0.0.1:8000"}
JSON = {"Content-Type": "application/json", "Content-Length": "2"}
TEXT = {"Content-Type": "text/plain;charset=UTF-8", "Content-Length": "2"}
SOUND = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": "2"}
PAGE_OF_ANOTHER = {**LOCAL, "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
IMAGE = {**LOCAL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
LINK = {**LOCAL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
REBOUND = {"Host": "evil.example:8000", "Sec-Fetch-Site": "same-origin"}
LOCAL_PAGE = {**LOCAL, "Origin": "http://localhost:3000", "Sec-Fetch-Site": "cross-site"}


def status(policy: BrowserPolicy, headers: dict[str, str], **request: Any) -> int:
    refusal = policy.refuse(headers, is_change=request.get("is_change", False))
    return refusal.status if refusal else 200


@pytest.mark.parametrize(
    ("request_of", "headers", "is_change", "expected"),
    [
        ("curl", LOCAL, True, (200, 200, 200)),
        ("an SDK by HTTP/1.0", {}, True, (200, 200, 200)),
        ("Node's fetch", {**LOCAL, **JSON, "Sec-Fetch-Mode": "cors"}, True, (200, 200, 200)),
        ("a proxy that keeps the name", {"Host": "llm.example", **JSON}, True, (403, 200, 200)),
        ("fetch by a page of another site", {**PAGE_OF_ANOTHER, **TEXT}, True, (403, 403, 200)),
        ("a form there", {**PAGE_OF_ANOTHER, "Origin": "null", **TEXT}, True, (403, 403, 200)),
        ("reading there", PAGE_OF_ANOTHER, False, (403, 403, 200)),
        ("an image there", IMAGE, True, (403, 403, 200)),
        ("an image there that changes nothing", IMAGE, False, (403, 403, 200)),
        ("a link there", LINK, False, (200, 200, 200)),
        ("a link there to what changes something", LINK, True, (403, 403, 200)),
        ("a page whose name leads here", REBOUND, False, (403, 200, 200)),
        ("a form of such a page", {**REBOUND, "Origin": "http://evil.example:8000"}, True, (403, 200, 200)),
        ("a page on another port", {**LOCAL_PAGE, **JSON}, True, (200, 200, 200)),
        ("plain text of that page", {**LOCAL_PAGE, **TEXT}, True, (415, 415, 200)),
        ("a sound of that page", {**LOCAL_PAGE, **SOUND}, True, (200, 200, 200)),
        ("a change without a body of that page", {**LOCAL_PAGE, "Content-Length": "0"}, True, (200,) * 3),
        ("an image on another port", {**LOCAL, "Sec-Fetch-Site": "same-site"}, True, (403, 403, 200)),
        ("the engine's own page", {**LOCAL, "Sec-Fetch-Site": "same-origin"}, True, (200, 200, 200)),
        ("an address that was typed", {**LOCAL, "Sec-Fetch-Site": "none"}, True, (200, 200, 200)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_answered_without_a_key_on_loopback_then_elsewhere_then_with_a_key(
    request_of: str, headers: dict[str, str], is_change: bool, expected: tuple[int, int, int]
) -> None:
    found = tuple(status(each, headers, is_change=is_change) for each in (LOOPBACK, OPEN, KEYED))
    assert found == expected


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((each, True) for each in ("localhost", "LOCALHOST:8000", "localhost.", "app.localhost:1", "box")),
        *((each, True) for each in ("127.0.0.1", "[::1]:8000", "192.168.1.5:8000", "[fe80::1%25eth0]:80")),
        *((each, True) for each in ("host.docker.internal:8000", "box.local")),
        *((each, False) for each in ("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example")),
        *((each, False) for each in ("box.evil.example", "xbox", "[", "user@evil.example:80", "a b")),
    ],
)  # fmt: skip
def test_a_name_is_this_machines_unless_somebody_could_register_it(host: str, is_own: bool) -> None:
    assert BOX.has(host) is is_own


def test_further_names_are_allowed_by_themselves_by_a_pattern_or_all() -> None:
    assert HostNames([], ["llm.example"]).has("LLM.example:443")
    assert HostNames([], ["*.llm.example"]).has("a.llm.example")
    assert not HostNames([], ["*.llm.example"]).has("allm.example")
    assert HostNames([], ["*"]).has("any.example")


@pytest.mark.parametrize(
    ("origin", "is_readable"),
    [
        *((each, True) for each in ("http://localhost", "http://localhost:3000", "https://127.0.0.1:8443")),
        *((each, True) for each in ("http://[::1]:5173", "http://app.localhost:1", "app://obsidian.md")),
        *((each, True) for each in ("file://", "tauri://localhost", "vscode-webview://1a2b")),
        *((each, True) for each in ("https://chat.example", "https://a.team.example:8443")),
        *((each, True) for each in ("chrome-extension://abcdef", "http://127.0.0.1:8000")),
        *((each, False) for each in ("", "null", "http://chat.example", "https://chat.example:444")),
        *((each, False) for each in ("https://evil.example", "https://chat.example.evil", "moz-extension://a")),
        *((each, False) for each in ("http://localhost.evil.example", "http://127.0.0.1.evil.example:80")),
        *((each, False) for each in ("https://evil.example/.team.example:8443", "xapp://a")),
    ],
)  # fmt: skip
def test_answers_are_readable_by_pages_of_this_machine_desktop_programs_and_allowed_origins(
    origin: str, is_readable: bool
) -> None:
    headers = {**LOCAL, "Origin": origin}
    assert LOOPBACK.readable_by(headers) == (origin if is_readable else "")
    assert status(LOOPBACK, headers) == (200 if is_readable or not origin else 403)


def test_every_origin_can_be_allowed() -> None:
    assert BrowserPolicy(BOX, ["*"]).readable_by(PAGE_OF_ANOTHER) == "https://evil.example"


def test_with_a_key_answers_are_still_readable_by_allowed_origins_alone() -> None:
    assert KEYED.readable_by(PAGE_OF_ANOTHER) == ""
    assert KEYED.readable_by(LOCAL_PAGE) == "http://localhost:3000"


def test_cookies_never_go_with_a_request_of_another_origin() -> None:
    assert "Access-Control-Allow-Credentials" not in readable_headers("http://localhost:3000")


def test_a_preflight_names_its_origin_and_the_method_that_will_follow() -> None:
    asked = {**LOCAL_PAGE, "Access-Control-Request-Method": "POST"}
    assert is_preflight("OPTIONS", asked)
    assert not is_preflight("POST", asked)
    assert not is_preflight("OPTIONS", LOCAL)


@pytest.mark.parametrize("headers", [REBOUND, PAGE_OF_ANOTHER])
def test_a_refusal_says_which_option_lets_it_in(headers: dict[str, str]) -> None:
    refusal = LOOPBACK.refuse(headers, is_change=True)
    assert refusal is not None
    assert "--Frontend.allowed-" in refusal.message
    assert "evil.example" in refusal.message
