"""``dynaplan run``: GPUs are lent to programs, and come back whoever is killed; ``gpus`` shows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan
from tests.e2e.held import serve_of
from tests.fakes.polling import wait_until

TWO_GPUS = ("graphs.agg:Frontend", "agg.yaml", "--gpus", "2", "--Planner.no-operation=true")


class Program:
    """A ``dynaplan run`` beside a deployment; its command writes the pids of its processes into a file."""

    def __init__(self, deployment: Deployment, directory: Path, *options: str, script: str = "") -> None:
        self._pids = directory / f"pids-{len(list(directory.glob('pids-*')))}"
        self._pids.touch()
        script = f"echo $$ >> {self._pids}; setsid sleep 300 & echo $! >> {self._pids}; {script or 'wait'}"
        self.process = subprocess.Popen(
            [dynaplan(), "run", *options, "--", "sh", "-c", script],
            cwd=REPOSITORY,
            env=deployment.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def started(self) -> None:
        wait_until(lambda: len(self._pids.read_text().split()) == 2, 60)

    def ended(self) -> tuple[int, str]:
        """Wait for the end of it; return its exit code and output. Nothing of the command is left."""
        output, _ = self.process.communicate(timeout=60)
        pids = [int(pid) for pid in self._pids.read_text().split()]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 30)
        return self.process.returncode, output


def holders(deployment: Deployment) -> list[list[str]]:
    """Who has each GPU."""
    answer = deployment.run("gpus", "--json")
    assert answer.returncode == 0, answer.stderr
    gpus: list[dict[str, Any]] = json.loads(answer.stdout)
    return [[holder["who"] for holder in each["holders"]] for each in gpus]


def test_gpus_are_lent_to_several_and_come_back_whoever_is_killed(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(*TWO_GPUS)
    worker = "dynamo_VllmWorker"

    both = [Program(deployment, tmp_path, "--yes", *more) for more in ((), ("--for", "1h"))]
    for each in both:
        each.started()
    assert deployment.workers("VllmWorker") == {}
    assert all(len(who) == 1 and ": sh -c " in who[0] for who in holders(deployment))
    refused = deployment.run("run", "--", "true")
    assert refused.returncode == 2
    assert "1 of 2 GPUs asked for, and 0 can be lent now" in refused.stderr
    assert refused.stderr.count(": lent to ") == 2
    released = deployment.run("release").stdout
    assert released.count(" ends that") == 2, released

    serve = wait_until(lambda: serve_of(deployment))
    serve.kill()  # its supervisor starts it again
    wait_until(lambda: (now := serve_of(deployment)) and now.pid != serve.pid, 60)
    assert deployment.workers("VllmWorker") == {}
    assert len(holders(deployment)[0]) == 1

    both[1].process.kill()
    assert both[1].ended()[0] == -signal.SIGKILL
    wait_until(lambda: deployment.workers("VllmWorker").get(worker, {}).get("state") == "ready", 60)
    assert sorted(": sh -c " in who[0] for who in holders(deployment)) == [False, True]

    both[0].process.send_signal(signal.SIGTERM)
    code, output = both[0].ended()
    assert code == 128 + signal.SIGTERM
    assert "given back" in output
    wait_until(lambda: sorted(map(len, holders(deployment))) == [0, 1], 30)


@pytest.mark.slow
def test_a_command_is_asked_to_end_and_then_killed_and_its_signals_and_exit_code_are_passed_through(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(*TWO_GPUS)
    answer = deployment.run("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; echo no >&2; exit 7")
    assert (answer.returncode, answer.stdout) == (7, "GPU-SIM-1\n")
    assert "no\n" in answer.stderr

    stubborn = Program(
        deployment, tmp_path, "--for", "1s", "--grace", "1s", script="trap 'echo asked' TERM; wait; wait"
    )
    code, output = stubborn.ended()
    assert code == 128 + signal.SIGKILL
    assert "it is asked to end at " in output.splitlines()[0]
    assert "asked\n" in output
    assert "it has not ended: it is killed" in output

    told = Program(deployment, tmp_path, script="trap 'echo told; exit 3' USR1; wait")
    told.started()
    os.kill(told.process.pid, signal.SIGUSR1)
    code, output = told.ended()
    assert code == 3
    assert "told\n" in output

    waits = Program(deployment, tmp_path)
    waits.started()
    late = deployment.run("run", "--wait", "2s", "--gpus", "2", "--yes", "--", "true")
    assert late.returncode == 1
    assert "not within 00:02" in late.stderr
    waits.process.send_signal(signal.SIGHUP)  # the terminal goes
    assert waits.ended()[0] == 128 + signal.SIGHUP
    assert deployment.run("run", "--gpus", "3", "--", "true").returncode == 2
    wait_until(lambda: [] in holders(deployment), 30)
