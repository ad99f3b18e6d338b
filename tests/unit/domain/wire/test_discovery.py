from __future__ import annotations

import pytest

from dynaplan.domain.wire.discovery import PUBLIC_URL, Instance, public_urls

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
