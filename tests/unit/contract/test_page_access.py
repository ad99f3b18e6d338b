"""The page's token, its cookie and its key: each opens what it should, in its time, and nothing else."""

from __future__ import annotations

import pytest

from dynaplan.contract.page_access import (
    SESSION_S,
    cookie_name,
    is_key,
    is_session,
    is_token,
    new_session,
    page_token,
    page_url,
    session_key,
)

SECRET, OTHER = "secret", "another secret"


def test_the_address_holds_the_token_and_not_the_secret() -> None:
    url = page_url("http://127.0.0.1:8000", SECRET)
    assert url == f"http://127.0.0.1:8000/ui?token={page_token(SECRET)}"
    assert SECRET not in url


def test_only_the_deployments_own_token_is_one() -> None:
    assert is_token(SECRET, page_token(SECRET))
    assert not is_token(OTHER, page_token(SECRET))
    assert not is_token(SECRET, "")
    assert not is_token(SECRET, "\udcff")


def test_a_session_lasts_for_its_time() -> None:
    cookie = new_session(SECRET, 1000.0, "n")
    assert is_session(SECRET, cookie, 1000.0 + SESSION_S - 1)
    assert not is_session(SECRET, cookie, 1000.0 + SESSION_S)


@pytest.mark.parametrize("cookie", ["", "x", ".", "9999999999.n.", "9999999999.n.00", "no.number.x"])
def test_a_cookie_that_was_not_made_here_is_none(cookie: str) -> None:
    assert not is_session(SECRET, cookie, 0.0)


def test_a_cookie_cannot_be_prolonged_or_used_at_another_deployment() -> None:
    cookie = new_session(SECRET, 1000.0, "n")
    end, nonce, proof = cookie.split(".")
    assert not is_session(SECRET, f"{int(end) + 1}.{nonce}.{proof}", 1000.0)
    assert not is_session(OTHER, cookie, 1000.0)


def test_a_key_belongs_to_one_session() -> None:
    one, other = (new_session(SECRET, 1000.0, nonce) for nonce in "ab")
    assert is_key(SECRET, one, session_key(SECRET, one))
    assert not is_key(SECRET, other, session_key(SECRET, one))
    assert not is_key(SECRET, one, "")


def test_token_key_and_cookie_differ_so_none_stands_for_another() -> None:
    cookie = new_session(SECRET, 1000.0, "n")
    assert len({page_token(SECRET), session_key(SECRET, cookie), cookie.rpartition(".")[2]}) == 3


def test_deployments_on_one_host_have_cookies_of_their_own() -> None:
    assert cookie_name(SECRET) != cookie_name(OTHER)
