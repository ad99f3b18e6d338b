"""Whom the guard of the page believes, whatever else a browser or a client sends."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynaplan.contract.page_access import cookie_name, new_session
from dynaplan.http.browser_policy import HostNames
from dynaplan.http.messages import Headers, Request
from dynaplan.webui.page_guard import PageGuard, PageRefusal

SECRET = "secret"
SESSION = new_session(SECRET, 1000.0, "n")
OWN = f"{cookie_name(SECRET)}={SESSION}"


def guard(host: str = "127.0.0.1") -> PageGuard:
    return PageGuard(SECRET, HostNames([host]), now_s=lambda: 1000.0)


def request(**headers: str) -> Request:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    nothing = cast(Any, None)
    return Request("GET", "/ui", "/ui", Headers(pairs), nothing, nothing, "name")


@pytest.mark.parametrize(
    "header",
    [
        OWN,
        f'other={{"a": 1}}; {OWN}',
        f"u[1]=2;{OWN}",
        f"x@y=1; {OWN}; z",
        f"{cookie_name(SECRET)}=of-another-path; {OWN}",
    ],
)
def test_the_session_is_found_beside_whatever_cookies_of_other_programs(header: str) -> None:
    assert guard().check_cookie(request(Cookie=header)) == SESSION


@pytest.mark.parametrize("header", ["", f"x{OWN}", f"{OWN}x", f"{cookie_name(SECRET)}", f'other="; {OWN}x"'])
def test_a_header_without_the_session_is_refused(header: str) -> None:
    with pytest.raises(PageRefusal) as refusal:
        guard().check_cookie(request(Cookie=header))
    assert refusal.value.status == 401


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
@pytest.mark.parametrize("headers", [{}, {"Host": ""}, {"Host": "site.example"}, {"Host": "["}])
def test_a_request_that_names_no_host_of_ours_is_refused(host: str, headers: dict[str, str]) -> None:
    with pytest.raises(PageRefusal) as refusal:
        guard(host).check_host(request(**headers))
    assert refusal.value.status == 421
