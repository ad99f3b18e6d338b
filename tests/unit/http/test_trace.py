"""Headers that go on from one server to the next."""

from __future__ import annotations

import pytest

from dynaplan.http.trace import MAX_TRACE_STATE, passed_headers, trace_headers

PARENT = f"00-{'4bf9' * 8}-{'00f0' * 4}-01"


@pytest.mark.parametrize("parent", [PARENT, PARENT.replace("00-", "cc-", 1) + "-what.will=be"])
def test_a_trace_goes_on_as_it_is(parent: str) -> None:
    assert trace_headers({"traceparent": parent, "other": "x"}) == {"traceparent": parent}
    whole = {"traceparent": parent, "tracestate": "vendor=1,other=2"}
    assert trace_headers(whole) == whole


@pytest.mark.parametrize(
    "parent", [None, 5, "", "00-1-2-01", PARENT.upper(), PARENT + "\r\nHost: x", PARENT + "\n"]
)
def test_no_trace_goes_on_that_is_none(parent: object) -> None:
    assert trace_headers({"traceparent": parent, "tracestate": "vendor=1"}) == {}


@pytest.mark.parametrize("state", [None, 5, "", "a\r\nb", "\u00fc", "x" * (MAX_TRACE_STATE + 1)])
def test_a_state_that_no_header_can_be_is_left_out(state: object) -> None:
    assert trace_headers({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


def test_a_usable_id_of_a_request_goes_on_with_its_trace() -> None:
    headers = {"traceparent": PARENT, "X-Request-Id": "mine-7-0a1b2c3d", "other": "x"}
    assert passed_headers(headers) == {"traceparent": PARENT, "X-Request-Id": "mine-7-0a1b2c3d"}
    for unusable in ("a b", "", "x" * 161, 7, None):
        assert passed_headers({"X-Request-Id": unusable}) == {}
