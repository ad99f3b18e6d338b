"""Large bodies share a budget; small ones are not counted."""

from __future__ import annotations

from contextlib import closing

import pytest

from dynaplan.gateway.openai_api import ApiError
from dynaplan.gateway.request_bodies import MAX_UNCOUNTED_BYTES, BodyBudget, BodyShare

LARGE = MAX_UNCOUNTED_BYTES + 1


def test_a_body_is_counted_from_the_moment_that_it_is_large_and_until_its_request_ends() -> None:
    budget = BodyBudget(10 * LARGE)
    with closing(BodyShare(budget)) as share:
        share.grow_to(MAX_UNCOUNTED_BYTES)
        assert budget.held_bytes == 0
        share.grow_to(LARGE)
        share.grow_to(2 * LARGE)
        assert budget.held_bytes == 2 * LARGE
    assert budget.held_bytes == 0


def test_a_used_up_budget_refuses_large_bodies_and_no_small_ones() -> None:
    budget = BodyBudget(2 * LARGE)
    with closing(BodyShare(budget)) as share, closing(BodyShare(budget)) as other:
        share.grow_to(2 * LARGE)
        with pytest.raises(ApiError, match="max-bodies-bytes") as refused:
            other.grow_to(LARGE)
        assert refused.value.status == 503
        assert refused.value.headers["Retry-After"]
        with pytest.raises(ApiError):
            other.check(LARGE)
        other.check(MAX_UNCOUNTED_BYTES)
        other.grow_to(MAX_UNCOUNTED_BYTES)
        share.check(2 * LARGE)
    with closing(BodyShare(budget)) as share:
        share.grow_to(2 * LARGE)
