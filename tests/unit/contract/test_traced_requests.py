from __future__ import annotations

from typing import Any

import pytest

from dynaplan.contract.traced_requests import TracedRequest

REQUEST = TracedRequest(1.5, 100, 20, (7, 8), 48)


@pytest.mark.parametrize("request_", [REQUEST, TracedRequest(0.0, 1, 1)])
def test_a_request_is_read_as_it_was_written(request_: TracedRequest) -> None:
    assert TracedRequest.from_json(request_.to_json()) == request_


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arrival_s", "soon"),
        ("arrival_s", True),
        ("arrival_s", 1e13),
        ("prompt_tokens", 1.5),
        ("output_tokens", -1),
        ("block_hashes", "7, 8"),
        ("block_hashes", [7, "8"]),
        ("block_hashes", [True]),
        ("block_tokens", 0),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        TracedRequest.from_json({**REQUEST.to_json(), field: value})


def test_a_missing_field_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="arrival_s"):
        TracedRequest.from_json({"prompt_tokens": 1, "output_tokens": 1})
