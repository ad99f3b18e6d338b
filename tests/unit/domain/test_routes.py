"""Headers that go on from one server to the next."""

from __future__ import annotations

import pytest

from dynaplan.domain.routes import LONGEST_STATE, trace_headers

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


@pytest.mark.parametrize("state", [None, 5, "", "a\r\nb", "\u00fc", "x" * (LONGEST_STATE + 1)])
def test_a_state_that_no_header_can_be_is_left_out(state: object) -> None:
    assert trace_headers({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}
