"""Whole deployments on virtual time, harmed by what a seed draws: a failing one is repeated by its number."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest

from tests.chaos.schedules import schedule
from tests.chaos.schedules.schedule import Outcome, run_schedule
from tests.e2e.traces import in_torture

SEEDS = range(8)
MANY, AT_ONCE = 10_000, 1000


def told(outcomes: list[Outcome]) -> str:
    """What was wrong, and the commands that repeat it."""
    return "\n".join(
        "\n  ".join([f"python -m tests.chaos.schedules --seed {each.seed}", *each.wrong]) for each in outcomes
    )


def harmed(seeds: range) -> list[Outcome]:
    failed = []
    for seed in seeds:
        if (outcome := run_schedule(seed)).wrong:
            failed.append(outcome)
        gc.collect()
    return failed


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_once_and_all_is_whole_after_any_schedule_of_faults(seed: int) -> None:
    failed = harmed(range(seed, seed + 1))
    assert not failed, told(failed)


@in_torture
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_every_request_ends_once_after_ten_thousand_schedules_of_faults(first: int) -> None:
    failed = harmed(range(first, first + AT_ONCE))
    assert not failed, told(failed)


def test_a_seed_draws_the_same_schedule_again_with_the_same_outcome() -> None:
    assert run_schedule(5) == run_schedule(5)


@pytest.mark.parametrize(
    ("place", "sight"),
    [
        ("fleet.plugin.store_link.StoreLink.acknowledge", "never began"),
        ("gateway.migration.MigratableStream.migrate", "another text"),
    ],
)
def test_a_broken_product_is_seen(place: str, sight: str) -> None:
    with patch(f"dynaplan.{place}", broken(place)), patch(f"{schedule.__name__}.WHOLE_WITHIN_S", 20.0):
        assert any(sight in line for seed in SEEDS for line in run_schedule(seed).wrong)


def broken(place: str) -> object:
    """Nothing is acknowledged; or a stream that migrates begins anew."""
    if place.endswith("acknowledge"):
        return lambda self, decision_id: None
    return lambda self, tokens, api: self.asked
