"""A service is without hope when every worker of it has failed for good; the cause is one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from dynaplan.contract.absence import (
    ABSENT,
    Absence,
    absence_fields,
    absences,
    cause,
    read_absence,
    unstartable_services,
)
from dynaplan.graph.lifecycle import Worker
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, READY, STARTING, worker

LOST = replace(worker("VllmWorker", FAILED), reason="can never start (exit code 78)")


def test_all_workers_that_count_must_have_failed_for_good() -> None:
    assert unstartable_services([LOST, worker("VllmWorker_1", DRAINING)]) == {"VllmWorker": LOST}
    assert unstartable_services([LOST, worker("VllmWorker_1", READY)]) == {}
    assert unstartable_services([LOST, worker("PrefillWorker", READY)]).keys() == {"VllmWorker"}
    assert unstartable_services([replace(LOST, retry_at_s=30.0)]) == {}
    assert unstartable_services([]) == {}


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
    absence = absences([LOST], 0.0, 0.0)["VllmWorker"]
    assert absence.message(0.0).startswith(
        "VllmWorker cannot start: can never start (exit code 78); see `dynap"
    )
    assert absence.retry_s(0.0) == math.inf


CRASHED = replace(worker("VllmWorker", BACKOFF), reason="killed by SIGKILL: x", retry_at_s=108.2)


@pytest.mark.parametrize(
    ("workers", "retry_unix_s"),
    [
        ([CRASHED], 1009),
        ([CRASHED, replace(CRASHED, name="w", retry_at_s=104.0)], 1004),
        ([replace(CRASHED, retry_at_s=99.0)], 0),
        ([CRASHED, LOST], 1009),
        ([replace(CRASHED, state=FAILED)], 1009),
        ([replace(CRASHED, state=STARTING, restarts_s=(99.0,))], 0),
        ([replace(CRASHED, state=STARTING, failures=1)], 0),
    ],
)
def test_when_all_have_crashed_the_reason_and_the_next_start_are_told(
    workers: list[Worker], retry_unix_s: int
) -> None:
    absence = absences(workers, 100.0, 1000.0)["VllmWorker"]
    assert absence.retry_unix_s == retry_unix_s
    assert absence.why.endswith(" has ended (killed by SIGKILL: x)")


def test_nothing_is_told_of_a_service_that_has_a_worker_or_starts_its_first() -> None:
    for other in (READY, STARTING):
        assert absences([CRASHED, worker("VllmWorker_1", other)], 0.0, 0.0) == {}
    lapsed = replace(worker("VllmWorker", STARTING), restarts_s=(1.0,), url="http://x")
    assert absences([lapsed], 0.0, 0.0) == {}


def test_what_is_published_is_read_again_by_a_frontend() -> None:
    document = json.dumps(absence_fields([CRASHED, worker("PrefillWorker", READY)], 100.0, 1000.0))
    absence = read_absence(document, "VllmWorker")
    assert absence == absences([CRASHED], 100.0, 1000.0)["VllmWorker"]
    assert read_absence(document, "PrefillWorker") is None


@pytest.mark.parametrize(
    ("published", "told", "retry_after_s"),
    [
        (Absence("It has ended", 108), "It has ended; it is started again in 8 s.", 9),
        (Absence("It has ended", 99), "It has ended; it is being started again.", 1),
        (Absence("It has ended"), "It has ended; it is being started again.", 1),
        (Absence("It cannot start", None), "It cannot start", 60),
    ],
)
def test_a_client_is_told_why_and_when(published: Absence, told: str, retry_after_s: int) -> None:
    assert published.message(100.0) == told
    assert published.retry_after_s(100.0) == retry_after_s
    assert read_absence(json.dumps({ABSENT: {"W": published.to_json()}}), "W") == published


@pytest.mark.parametrize(
    "fleet",
    [
        "",
        "[]",
        "{}",
        '{"absent": 5}',
        '{"absent": {"W": 5}}',
        '{"absent": {"W": {}}}',
        '{"absent": {"W": {"why": "x", "retry_unix_s": "soon"}}}',
    ],
)
def test_what_cannot_be_read_is_no_absence(fleet: str) -> None:
    assert read_absence(fleet, "W") is None
