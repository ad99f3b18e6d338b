from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaplan.process.identity import LeaseOwner, ProcessIdentity
from dynaplan.store.instances import PUBLIC_URL, Instance, host_of, is_loopback, public_urls

WORKER = Instance(
    "ns", "VllmWorker", "generate", 31, "http://127.0.0.1:1", "ns_VllmWorker", 7, {"model": "m"}
)


def test_a_registration_is_read_as_it_was_written() -> None:
    assert Instance.from_json(WORKER.to_json()) == WORKER


def test_the_key_has_the_lease_in_hexadecimal() -> None:
    assert WORKER.key == "/services/ns/VllmWorker/generate/1f"


@pytest.mark.parametrize("engine_url", ["", "http://127.0.0.1:2"])
def test_requests_for_tokens_go_to_the_engine_where_it_has_a_server_of_its_own(engine_url: str) -> None:
    worker = Instance("ns", "VllmWorker", "generate", 1, "http://127.0.0.1:1", engine_url=engine_url)
    assert worker.openai_url == (engine_url or "http://127.0.0.1:1")
    assert Instance.from_json(worker.to_json()) == worker


@pytest.mark.parametrize("text", ['{"owner": 1', '{"owner": {"pid": 1}', '{"owner": {"pid": "x"}'])
def test_an_owner_that_is_none_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Instance.from_json(text + WORKER.to_json().replace("{", ", ", 1))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"transport": 1}', '{"namespace": "ns"}'])
def test_anything_but_a_registration_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Instance.from_json(text)


def test_a_public_address_that_several_frontends_share_counts_once_and_nonsense_not_at_all() -> None:
    cards = (
        {PUBLIC_URL: "http://a"},
        {PUBLIC_URL: "http://b"},
        {PUBLIC_URL: "http://a"},
        {PUBLIC_URL: 7},
        {},
    )
    workers = [Instance("ns", "Frontend", "http", number, "", card=card) for number, card in enumerate(cards)]
    assert public_urls(workers) == ("http://a", "http://b")


def test_an_unmanaged_worker_and_its_host_are_told() -> None:
    owner = LeaseOwner(ProcessIdentity(7, 4711, "boot"), 4026531836)
    worker = replace(
        WORKER, host="gpu1", network="boot/4", is_managed=False, card={"gpus": [0, 3]}, owner=owner
    )
    assert Instance.from_json(worker.to_json()) == worker
    assert Instance.from_json(WORKER.to_json()).is_managed


@pytest.mark.parametrize(
    ("url", "network", "is_within_reach"),
    [
        ("http://127.0.0.1:1", "boot/4", True),
        ("http://127.0.0.1:1", "boot/5", False),
        ("http://[::1]:1", "boot/5", False),
        ("http://localhost:1", "boot/5", False),
        ("http://10.0.0.2:1", "boot/5", True),
        ("http://gpu2:1", "boot/5", True),
        ("http://127.0.0.1:1", "", True),
        ("", "boot/5", True),
    ],
)
def test_loopback_leads_to_the_own_host_only(url: str, network: str, is_within_reach: bool) -> None:
    worker = replace(WORKER, url=url, network="boot/4")
    assert worker.is_within_reach(network) is is_within_reach
    assert replace(worker, network="").is_within_reach(network)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://gpu2:1/path", "gpu2"),
        ("https://[fd00::1]:1", "[fd00::1]"),
        ("http://[fd00::1", "[fd00::1]"),
        ("nonsense", ""),
    ],
)
def test_the_host_of_a_url_is_read_from_anything(url: str, host: str) -> None:
    assert host_of(url) == host
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("prefill", "decode", "can"),
    [
        ({"network": "a"}, {"network": "a"}, True),
        ({"network": "a"}, {"network": "b"}, False),
        ({}, {"network": "b"}, True),
        ({"network": "a", "card": {"kv_network": True}}, {"network": "b"}, False),
        (
            {"network": "a", "card": {"kv_network": True}},
            {"network": "b", "card": {"kv_network": True}},
            True,
        ),
    ],
)
def test_kv_entries_move_on_one_host_or_over_a_network_that_both_have_opened(
    prefill: dict[str, Any], decode: dict[str, Any], can: bool
) -> None:
    assert replace(WORKER, **prefill).can_hand_over_to(replace(WORKER, **decode)) is can
