"""The labels of answers in the metrics."""

from __future__ import annotations

import pytest

from dynaplan.gateway import request_path


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (200, ""),
        (400, "validation"),
        (404, "validation"),
        (429, "overload"),
        (500, "internal"),
        (501, "not_implemented"),
        (503, "internal"),
    ],
)
def test_an_engine_that_lacks_a_feature_has_not_failed(status: int, error_type: str) -> None:
    assert request_path._error_type(status) == error_type
