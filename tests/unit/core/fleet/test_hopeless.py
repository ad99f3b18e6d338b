"""A service is without hope when every worker of it has failed for good; the cause is one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.core.fleet.hopeless import cause, hopeless, published
from tests.unit.core.fleet.graphs import DRAINING, FAILED, READY, worker

LOST = replace(worker("VllmWorker", FAILED), reason="can never start (exit code 78)")


def test_all_workers_that_count_must_have_failed_for_good() -> None:
    assert hopeless([LOST, worker("VllmWorker_1", DRAINING)]) == {"VllmWorker": LOST}
    assert hopeless([LOST, worker("VllmWorker_1", READY)]) == {}
    assert hopeless([LOST, worker("PrefillWorker", READY)]).keys() == {"VllmWorker"}
    assert hopeless([replace(LOST, retry_at_s=30.0)]) == {}
    assert hopeless([]) == {}


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", "can never start (exit code 78)"),
        ("\nsome line", "can never start (exit code 78)"),
        ("\nthis worker can never start: there is no model\n  Give one.", "there is no model"),
        (
            "\nthis worker can never start: vllm exited with 2; its last lines:\n a\n no such file",
            "vllm exited with 2: no such file",
        ),
    ],
)
def test_the_cause_is_the_last_word_of_the_log(log: str, told: str) -> None:
    assert cause(replace(LOST, reason=LOST.reason + log)) == told


def test_a_worker_without_a_reason_says_so_and_what_is_published_names_the_command() -> None:
    assert cause(replace(LOST, reason="")) == "no reason is known"
    (words,) = published([LOST])["hopeless"].values()
    assert words.startswith("VllmWorker cannot start: can never start (exit code 78); see `dynaplan logs")
