from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dynaplan.engines.server.child import EngineChild, describe_exit
from dynaplan.process.kernel import EXIT_CANNOT_START
from dynaplan.process.process_table import descendants_of, group_members, identify
from tests.fakes.polling import eventually, wait_until

Spawn = Callable[..., EngineChild]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    children: list[EngineChild] = []

    def start(*argv: str, **extra: str) -> EngineChild:
        children.append(EngineChild.spawn(argv, extra))
        return children[-1]

    yield start
    for child in children:
        await child.stop(0)


def shell(script: str) -> tuple[str, ...]:
    return "sh", "-c", script


async def printed(child: EngineChild, text: str) -> None:
    await eventually(lambda: text in child.last_lines())


def below(child: EngineChild, words: str) -> int:
    """The process below the shim with this command line; 0 without one."""
    for pid in descendants_of(child.pid):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line.rstrip(b"\0").replace(b"\0", b" ").decode() == words:
                return pid
    return 0


def kill_named(child: EngineChild, last_word: str) -> None:
    for pid in group_members(child.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if words[-1].decode() == last_word:
            os.kill(pid, signal.SIGKILL)


async def test_the_end_of_the_engine_is_noticed_with_its_exit_code(spawn: Spawn) -> None:
    child = spawn(*shell("exit 3"))
    assert await asyncio.wait_for(child.wait(), 5) == 3
    assert child.has_exited


async def test_a_kill_is_told_as_a_signal(spawn: Spawn) -> None:
    child = spawn("sleep", "60")
    os.kill(await eventually(lambda: child.engine_pid), signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 5) == -signal.SIGKILL


async def test_the_end_of_a_part_that_it_is_dead_without_is_noticed_while_its_leader_goes_on(
    spawn: Spawn,
) -> None:
    child = spawn(*shell("sh -c 'echo up; sleep 61' core & sh -c 'sleep 62' helper & wait; sleep 60"))
    await printed(child, "up")
    await eventually(lambda: len(group_members(child.pid)) >= 3)
    lost = asyncio.create_task(child.wait_for_lost_part(["core"]))
    await asyncio.sleep(0)
    kill_named(child, "core")

    assert (await asyncio.wait_for(lost, 5)).endswith("core")
    assert not child.has_exited


async def test_a_program_that_is_not_there_is_an_engine_that_ends(spawn: Spawn) -> None:
    child = spawn("no-such-program-anywhere")
    assert await asyncio.wait_for(child.wait(), 5) == EXIT_CANNOT_START
    assert "cannot run no-such-program-anywhere" in child.last_lines()


async def test_it_has_a_process_group_of_its_own_in_our_session(spawn: Spawn) -> None:
    child = spawn("sleep", "60")
    engine = await eventually(lambda: child.engine_pid)
    assert os.getpgid(engine) == child.pid
    assert os.getsid(engine) == os.getsid(0)


async def test_none_of_our_secrets_gets_into_its_environment(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DYNAPLAN_WORKER_TOKEN", "DYNAPLAN_API_KEY", "NATS_AUTH_TOKEN", "ETCD_AUTH_PASSWORD"):
        monkeypatch.setenv(name, f"hush-{name}")
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", '{"Frontend": {"api-key": "hush"}}')
    monkeypatch.setenv("DYNAPLAN_WORKER_NAME", "worker-1")
    child = spawn("env", ENGINE_KEY="its own")
    await child.wait()
    text = child.last_lines()
    assert "hush" not in text
    assert "DYNAPLAN_WORKER_NAME=worker-1" in text  # by it the remains of a killed worker are recognised
    assert "ENGINE_KEY=its own" in text


async def test_it_reads_nothing_from_our_standard_input(spawn: Spawn) -> None:
    assert await asyncio.wait_for(spawn("cat").wait(), 5) == 0


async def test_what_it_prints_is_passed_on_and_its_last_lines_are_kept(
    spawn: Spawn, capfd: pytest.CaptureFixture[str]
) -> None:
    child = spawn(*shell("for i in $(seq 1 100); do echo line $i; done; printf half >&2"))
    await child.wait()
    lines = child.last_lines().splitlines()
    assert lines[-2:] == ["line 100", "half"]
    assert len(lines) <= 31
    assert capfd.readouterr().err.count("line") == 100


async def test_a_secret_is_masked_even_when_it_is_printed_in_two_parts(
    spawn: Spawn, capfd: pytest.CaptureFixture[str]
) -> None:
    child = EngineChild.spawn(shell("printf 'key=sec'; sleep 0.05; printf 'ret!'"), {}, hidden="secret")
    await child.wait()
    await child.stop(0)
    assert child.last_lines() == "key=***!"
    assert capfd.readouterr().err == "key=***!"


async def test_an_engine_that_prints_much_is_not_held_up(spawn: Spawn) -> None:
    child = spawn(*shell("yes | head -c 2000000; exit 7"))
    assert await asyncio.wait_for(child.wait(), 20) == 7


async def test_stopping_lets_it_end_by_itself(spawn: Spawn) -> None:
    child = spawn(*shell('trap "exit 5" TERM; echo up; while :; do sleep 0.01; done'))
    await printed(child, "up")
    await child.stop(30)
    assert await child.wait() == 5


async def test_a_stop_just_after_the_engine_has_ended_by_itself_does_not_wait(spawn: Spawn) -> None:
    child = spawn(*shell("exit 5"))
    zombie = psutil.STATUS_ZOMBIE
    wait_until(lambda: psutil.Process(child.pid).status() == zombie)  # which the event loop does not see
    async with asyncio.timeout(5):
        await child.stop(60)
        assert await child.wait() == 5
    assert not psutil.pid_exists(child.pid)


async def test_a_stop_that_is_cancelled_after_the_kill_still_waits_until_the_processes_have_ended(
    spawn: Spawn,
) -> None:
    child = spawn("sleep", "60")
    stopping = asyncio.create_task(child.stop(0))
    await asyncio.sleep(0)  # SIGKILL is sent, and it waits
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert child.has_exited
    assert not psutil.pid_exists(child.pid)


async def test_a_stop_that_is_cancelled_ends_its_command_too(spawn: Spawn, tmp_path: Path) -> None:
    child, pid = spawn("sleep", "60"), tmp_path / "pid"
    stopping = asyncio.create_task(child.stop(30, shell(f"echo $$ > {pid}; exec sleep 60")))
    await eventually(lambda: pid.exists() and pid.read_text().endswith("\n"))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not psutil.pid_exists(int(pid.read_text()))


async def test_a_command_ends_it_in_the_place_of_sigterm(spawn: Spawn) -> None:
    child = spawn(*shell('trap "exit 5" USR1; trap "exit 6" TERM; echo up; while :; do sleep 0.01; done'))
    await printed(child, "up")
    await child.stop(30, shell(f"kill -USR1 {child.engine_pid}"))
    assert await child.wait() == 5


@pytest.mark.parametrize("command", [shell("exit 3"), ("no-such-program",), shell("sleep 60 & wait")])
async def test_one_that_its_command_does_not_end_is_killed_at_the_deadline_and_so_is_the_command(
    spawn: Spawn, command: tuple[str, ...]
) -> None:
    child = spawn("sleep", "60")
    await eventually(lambda: child.engine_pid)
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    await child.stop(0.3, command)
    assert await child.wait() == -signal.SIGKILL
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


async def test_one_that_ignores_sigterm_is_killed_at_the_deadline(spawn: Spawn) -> None:
    child = spawn(*shell('trap "" TERM; echo up; while :; do sleep 0.01; done'))
    await printed(child, "up")
    await child.stop(0.05)
    assert await child.wait() == -signal.SIGKILL
    assert group_members(child.pid) == ()


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
async def test_what_a_dead_engine_leaves_behind_has_gone_when_its_end_is_told(
    spawn: Spawn, ends: signal.Signals
) -> None:
    child = spawn(*shell('(trap "" TERM; echo up; while :; do sleep 0.01; done) & setsid sleep 63 & wait'))
    await printed(child, "up")
    apart = await eventually(lambda: below(child, "sleep 63"))
    os.kill(child.engine_pid, ends)
    assert await child.wait() == -ends
    assert group_members(child.pid) == ()
    assert identify(apart) is None
    await child.stop(5)
    assert identify(child.pid) is None


async def test_what_a_killed_shim_leaves_behind_is_killed_with_its_group(spawn: Spawn) -> None:
    child = spawn(*shell('(trap "" TERM; echo up; while :; do sleep 0.01; done) & wait'))
    await printed(child, "up")
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert group_members(child.pid) != ()
    await child.stop(5)
    assert group_members(child.pid) == ()


async def test_an_engine_that_was_stopped_with_its_shim_is_ended_with_all_below(spawn: Spawn) -> None:
    child = spawn(*shell("setsid sleep 63 & echo up; wait"))
    await printed(child, "up")
    apart = await eventually(lambda: below(child, "sleep 63"))
    os.killpg(child.pid, signal.SIGSTOP)
    await child.stop(0)
    assert group_members(child.pid) == ()
    assert identify(apart) is None


async def test_a_shim_that_does_not_hear_is_killed_with_everything_below_it(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaplan.engines.server.child.SHIM_TIMEOUT_S", 0.1)
    monkeypatch.setattr("dynaplan.engines.server.child.END_SIGNAL", signal.SIGCONT)
    child = spawn(*shell("setsid sleep 63 & echo up; wait"))
    await printed(child, "up")
    apart = await eventually(lambda: below(child, "sleep 63"))
    await child.stop(0)
    assert group_members(child.pid) == ()
    await eventually(lambda: identify(apart) is None)


async def test_the_shared_memory_of_a_killed_engine_is_removed_and_a_kill_does_not_block(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import time; from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096); print(memory.name, flush=True); time.sleep(600)"
    )
    child = spawn(sys.executable, "-c", script)
    await printed(child, "psm_")
    shared = Path("/dev/shm") / child.last_lines().strip()
    assert shared.exists()
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it blocks"))
    child.kill()
    await child.stop(0)
    assert group_members(child.pid) == ()
    assert not shared.exists()


async def test_stopping_twice_does_not_raise(spawn: Spawn) -> None:
    child = spawn("sleep", "60")
    await asyncio.gather(child.stop(1), child.stop(1))
    await child.stop(1)
    child.kill()


async def test_a_cancelled_stop_kills(spawn: Spawn) -> None:
    child = spawn(*shell('trap "" TERM; echo up; while :; do sleep 0.01; done'))
    await printed(child, "up")
    stopping = asyncio.create_task(child.stop(60))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert group_members(child.pid) == ()


async def test_it_leaves_no_descriptor_open(spawn: Spawn) -> None:
    await spawn("true").stop(0)
    before = set(os.listdir("/proc/self/fd"))
    await spawn("true").stop(0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_it_dies_with_the_worker() -> None:
    script = (
        "import asyncio, sys\n"
        "from dynaplan.engines.server.child import EngineChild\n"
        "async def main():\n"
        "    child = EngineChild.spawn(['setsid', 'sleep', '60'], {})\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2]
    )
    assert worker.stdout is not None
    shim = int(worker.stdout.readline())
    pids = wait_until(lambda: descendants_of(shim))
    wait_until(lambda: Path(f"/proc/{pids[-1]}/comm").read_text().strip() == "sleep")
    worker.kill()
    worker.communicate()
    wait_until(lambda: not any(identify(pid) for pid in (shim, *pids)))


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exited with 0"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")]
)
def test_an_exit_code_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def test_the_key_is_masked_in_what_the_server_prints_about_itself() -> None:
    child = EngineChild.spawn(("echo", "server_args={'api_key': 'secret'}"), {}, hidden="secret")
    try:
        await child.wait()
        assert child.last_lines().strip() == "server_args={'api_key': '***'}"
    finally:
        await child.stop(0)
