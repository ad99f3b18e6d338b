"""Announcements of event channels, in the form of Dynamo 1.6."""

from __future__ import annotations

import json

import pytest

from dynaplan.events.event_channels import EventChannel, channels_prefix

CHANNEL = EventChannel("my-ns", "backend", "generate", "kv-events", 0x12DFCEBB06F595, "tcp://10.0.0.1:44953")
OF_DYNAMO = (
    '{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"my-ns","component":"backend",'
    '"name":"generate"}},"topic":"kv-events","instance_id":5312628574844309,'
    '"transport":{"kind":"Zmq","config":{"endpoint":"tcp://10.0.0.1:44953"}}}'
)
"""What ai-dynamo-runtime 1.6.1 wrote, under the key below."""


def test_an_announcement_is_what_dynamo_writes() -> None:
    assert CHANNEL.to_json() == OF_DYNAMO
    assert EventChannel.from_json(OF_DYNAMO) == CHANNEL
    assert CHANNEL.key == (
        "v1/event_channels/namespace/my-ns/component/backend/endpoint/generate/topic/kv-events/12dfcebb06f595"
    )


def test_ours_says_where_events_can_be_asked_for_again() -> None:
    ours = EventChannel("n", "c", "e", "t", 1, "ipc:///a", "ipc:///b")
    assert EventChannel.from_json(ours.to_json()) == ours


def test_a_channel_over_nats_is_none_of_zmq() -> None:
    document = json.loads(OF_DYNAMO) | {"transport": {"kind": "Nats", "config": {"subject_prefix": "x"}}}
    with pytest.raises(ValueError, match="'kind' is 'Nats': expected 'Zmq'"):
        EventChannel.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"transport":{"kind":"Zmq","config":{}},"scope":{"kind":"x"}}']
)
def test_another_text_is_no_announcement(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        EventChannel.from_json(text)


@pytest.mark.parametrize(
    ("pattern", "end"),
    [
        ("n.c.e", "namespace/n/component/c/"),
        ("n.*.e", "namespace/n/component/"),
        ("n.>", "namespace/n/component/"),
        ("*.c.e", ""),
        (">", ""),
    ],
)
def test_only_the_keys_that_can_match_are_watched(pattern: str, end: str) -> None:
    assert channels_prefix(pattern) == f"v1/event_channels/{end}"
