"""What becomes of a worker whose process ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.rules.restarting import RestartPolicy, after_exit, describe_oom_kills, exit_reason
from dynaplan.graph.lifecycle import EXIT_CANNOT_START, EXIT_PROGRAM_ENDED, Worker, WorkerEvent
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, READY, STARTING, STOPPED, worker


def crash(times: int, now_s: float, between_s: float) -> tuple[Worker, list[float]]:
    """A worker that crashes again and again while it starts; the delays before its restarts."""
    crashing, delays = worker("VllmWorker", STARTING, gpus=(0,)), []
    for _ in range(times):
        crashing = after_exit(crashing, 1, now_s)
        if crashing.state is FAILED:
            break
        delays.append(crashing.retry_at_s - now_s)
        now_s = crashing.retry_at_s + between_s
        crashing = crashing.after(WorkerEvent.DELAY_OVER, now_s)
    return crashing, delays


def test_the_first_restart_is_at_once_and_the_next_ones_later_and_later() -> None:
    assert crash(5, 100.0, 0.1)[1] == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_too_many_restarts_in_the_window_is_failed_and_frees_the_gpus() -> None:
    failed, delays = crash(9, 100.0, 0.1)
    assert (failed.state, len(delays), failed.gpus) == (FAILED, 5, ())
    assert "exit code 1, after 5 restarts within 60 s" in failed.reason


def test_a_command_that_ends_before_it_answers_is_started_three_times() -> None:
    ended = worker("VllmWorker", STARTING, gpus=(0,))
    for _ in range(2):
        ended = after_exit(ended, EXIT_PROGRAM_ENDED, 1.0)
        assert ended.state is BACKOFF
        ended = ended.after(WorkerEvent.DELAY_OVER, 1.5)
    failed = after_exit(ended, EXIT_PROGRAM_ENDED, 2.0)
    assert failed.state is FAILED
    assert failed.reason == "its program ended before it answered, after 2 restarts within 60 s"


def test_slow_crashes_never_fail_but_wait_up_to_the_cap() -> None:
    crashing, delays = crash(40, 0.0, 20.0)
    assert crashing.state is STARTING
    assert delays[-1] == 30.0


def test_a_worker_that_was_stable_begins_anew() -> None:
    policy = RestartPolicy(stable_s=60)
    tried = replace(worker("VllmWorker"), restarts_s=(1.0, 2.0, 3.0, 4.0, 5.0), since_s=10.0)
    assert after_exit(tried, -9, 69.0, policy).retry_at_s == 69.0 + 8.0
    assert after_exit(tried, -9, 70.0, policy).retry_at_s == 70.0


@pytest.mark.parametrize("exit_code", [0, 1, -9, -15, None, EXIT_CANNOT_START])
def test_a_draining_worker_is_never_restarted(exit_code: int | None) -> None:
    assert after_exit(worker("VllmWorker", DRAINING, gpus=(0,)), exit_code, 1.0).state is STOPPED


@pytest.mark.parametrize("state", [STARTING, READY])
@pytest.mark.parametrize("exit_code", [0, 1, -9, None])
def test_a_worker_that_left_unasked_is_restarted_with_its_name_and_gpus(
    state: object, exit_code: int | None
) -> None:
    before = replace(worker("VllmWorker", gpus=(3,)), state=state, pid=7, started_at=8, instance_id=9)
    after = after_exit(before, exit_code, 1.0)
    assert (after.state, after.name, after.gpus) == (BACKOFF, before.name, (3,))
    assert (after.pid, after.started_at, after.instance_id) == (0, 0, 0)


def test_a_worker_that_can_never_start_is_not_retried() -> None:
    after = after_exit(worker("VllmWorker", STARTING, gpus=(0,)), EXIT_CANNOT_START, 1.0)
    assert (after.state, after.gpus, after.retry_at_s) == (FAILED, (), 0.0)


@pytest.mark.parametrize("state", [BACKOFF, FAILED, STOPPED])
def test_an_exit_told_twice_counts_once(state: object) -> None:
    before = worker("VllmWorker", state)  # type: ignore[arg-type]
    assert after_exit(before, 1, 1.0) == before


def test_the_reason_is_in_words() -> None:
    assert exit_reason(-9) == "killed by SIGKILL: the out-of-memory killer, or somebody's kill -9"
    assert exit_reason(-15) == "killed by SIGTERM"
    assert exit_reason(-9, "it stood still") == "killed by SIGKILL: it stood still"
    assert exit_reason(3) == "exit code 3"
    assert exit_reason(-100) == "killed by signal 100"
    assert exit_reason(None) == "exit code unknown"


def test_a_failed_worker_is_tried_again_later_and_later_up_to_five_minutes() -> None:
    now_s, waits = 0.0, []
    tried = crash(9, 0.0, 0.1)[0]
    for failures in range(1, 8):
        assert (tried.state, tried.failures) == (FAILED, failures)
        waits.append(tried.retry_at_s - tried.since_s)
        now_s = tried.retry_at_s
        replacement = replace(worker("VllmWorker", STARTING, gpus=(0,)), failures=tried.failures)
        tried = after_exit(replacement, 1, now_s)
    longest = [30, 60, 120, 240, 300, 300, 300]
    assert all(0.8 * most <= wait <= most for wait, most in zip(waits, longest, strict=True))


def test_workers_that_fail_together_are_not_tried_in_the_same_second() -> None:
    policy = RestartPolicy()
    assert len({round(policy.replacement_delay_s(3, f"ns_VllmWorker_{number}")) for number in range(8)}) > 4


def test_a_replacement_that_was_stable_has_all_its_restarts_again() -> None:
    replacement = replace(worker("VllmWorker", READY, gpus=(0,)), failures=3, since_s=0.0)
    after = after_exit(replacement, 1, 60.0)
    assert (after.state, after.failures) == (BACKOFF, 0)
    assert after_exit(replacement, 1, 59.0).state is FAILED


def test_the_out_of_memory_killer_is_named_when_it_has_ended_processes_meanwhile() -> None:
    killer = describe_oom_kills(1, "this control group")
    assert "out-of-memory killer ended a process of this control group meanwhile" in killer
    assert "ended 2 processes of this machine" in describe_oom_kills(2, "this machine")
    assert describe_oom_kills(0, "this machine") == ""
    crashed = after_exit(worker("VllmWorker", READY), 1, 1.0, killer=killer)
    assert crashed.reason.startswith("exit code 1: the kernel's out-of-memory killer")
