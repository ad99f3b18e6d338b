from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.store.nats_bucket import (
    GUARD,
    IDENTITY,
    JetStreamBucket,
    decode_key,
    encode_key,
    lease_name,
    parse_lease_name,
    subject_filter,
)

BYTES = st.binary(max_size=12).map(lambda data: data.decode(errors="surrogateescape"))
KEYS = st.one_of(st.text(st.sampled_from("ab/.=:- é*>"), max_size=12), BYTES)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("v1/box/planner/decision_id", "v1.box.planner.decision_id"),
        ("/services/box/Worker/generate", "=.services.box.Worker.generate"),
        ("v1/vllm-agg.2/Größe", "v1.vllm-agg=2E2.Gr=C3=B6=C3=9Fe"),
        ("", "="),
        ("/", "=.="),
        ("a//b/", "a.=.b.="),
    ],
)
def test_names_are_those_of_the_documentation(key: str, name: str) -> None:
    assert encode_key(key) == name
    assert decode_key(name) == key


@given(KEYS)
def test_every_key_comes_back_from_its_name(key: str) -> None:
    assert decode_key(encode_key(key)) == key


@given(KEYS)
def test_every_name_is_one_that_natss_own_clients_take(key: str) -> None:
    name = encode_key(key)
    assert re.fullmatch(r"[-/_=\.a-zA-Z0-9]+", name)
    assert not name.startswith(".")
    assert not name.endswith(".")
    assert ".." not in name


@given(KEYS, KEYS)
def test_two_keys_have_two_names(one: str, other: str) -> None:
    assert (encode_key(one) == encode_key(other)) == (one == other)


@given(KEYS, st.integers(0, 12))
def test_the_filter_of_a_prefix_lets_its_keys_through(key: str, length: int) -> None:
    prefix = key[:length]
    tokens, name = subject_filter(prefix).split("."), encode_key(key).split(".")
    assert tokens[-1] == ">"
    assert name[: len(tokens) - 1] == tokens[:-1]
    assert len(name) >= len(tokens)


@pytest.mark.parametrize("name", ["a/b", "a=2f", "a=2", "a=41", "a==", IDENTITY, GUARD, lease_name(7), "a*"])
def test_a_name_in_another_form_is_no_keys(name: str) -> None:
    assert decode_key(name) is None


def test_a_lease_has_a_name() -> None:
    assert parse_lease_name(lease_name(0x1F)) == 0x1F
    assert parse_lease_name("a.1f") is None
    assert parse_lease_name("=lease.x") is None


async def test_a_connection_that_is_lost_as_a_call_times_out_is_lost_all_the_same() -> None:
    bucket = JetStreamBucket({})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0) as limit:
            bucket._timeouts.add(limit)
            loss = asyncio.create_task(bucket.connection._on_disconnected())
            await asyncio.Event().wait()
    await loss
