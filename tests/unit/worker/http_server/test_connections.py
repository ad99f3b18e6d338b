"""The number of connections stays below that of the descriptors."""

from __future__ import annotations

from unittest import mock

import pytest

from dynaplan.worker.http_server.connections import MOST_CONNECTIONS, ConnectionLimits, raw_answer


@pytest.mark.parametrize(
    ("descriptors", "most", "expected"),
    [
        (1024, 0, 462),
        (1024, 100, 100),
        (1024, 5000, 462),
        (2**20, 0, MOST_CONNECTIONS),
        (2**20, 20_000, 20_000),
        (64, 0, 1),
    ],
)
def test_the_connections_leave_descriptors_for_their_requests(
    descriptors: int, most: int, expected: int
) -> None:
    with mock.patch("dynaplan.worker.http_server.connections.descriptor_limit", return_value=descriptors):
        assert ConnectionLimits(most=most).most_connections == expected


def test_an_answer_without_a_request_is_whole() -> None:
    head, _, body = raw_answer(503, "full", "too_many_connections").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Retry-After: 5" in head
    assert b"Content-Length: %d" % len(body) in head
    assert b'"message": "full"' in body
