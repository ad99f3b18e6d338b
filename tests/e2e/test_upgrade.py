"""``dynaplan upgrade``: another version takes over under load, or does not, and no request notices."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import dynaplan
from tests.e2e.deployment import MODEL, REPOSITORY, Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_kills import is_whole
from tests.e2e.test_serve_killed import QUIET, starts
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually, wait_until

pytestmark = in_torture

BROKEN = "raise SystemExit('a release that does not start')\n"


class Environment:
    """A virtual environment with a copy of this package that says another version."""

    def __init__(self, directory: Path, version: str) -> None:
        venv.create(directory, symlinks=True, with_pip=False)
        (packages,) = directory.glob("lib/python*/site-packages")
        self.python, self.package = directory / "bin" / "python", packages / "dynaplan"
        original = Path(dynaplan.__file__).parent
        shutil.copytree(original, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (self.package / "__init__.py").read_text()
        told = text.replace(f'"{dynaplan.__version__}"', f'"{version}"')
        (self.package / "__init__.py").write_text(told)
        others = [each for each in sys.path if each.endswith("site-packages")]
        (packages / "others.pth").write_text("\n".join(others) + "\n")

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-P", "-m", "dynaplan", *arguments]

    def run(self, deployment: Deployment, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this version against the deployment."""
        return subprocess.run(
            self.command(*arguments),
            env=deployment.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "new", "99.0.0")


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A directory with graphs and no package of dynaplan: workers import what is in their directory first."""
    shutil.copytree(REPOSITORY / "graphs", tmp_path / "place" / "graphs")
    return str(tmp_path / "place")


def of_another(deployment: Deployment, environment: Environment) -> list[list[str]]:
    """The command lines of Python processes that are not of the environment, but for those not renewed.

    These are the supervisor and the keeper of clients' connections.
    """
    lines = [each.cmdline() for each in deployment.children()]
    python = [
        line
        for line in lines
        if line and Path(line[0]).name.startswith("python") and "connection_keeper" not in " ".join(line)
    ]
    assert len(python) >= 6
    return [line for line in python if line[0] != str(environment.python)]


@pytest.mark.timeout(300)
async def test_another_version_takes_over_under_load_and_back_and_no_request_notices(
    deploy: Callable[..., Deployment], environment: Environment, place: str
) -> None:
    arguments = ("graphs.disagg:Frontend", "disagg.yaml", *QUIET, "--working-dir", place)
    deployment = await asyncio.to_thread(deploy, *arguments)
    before = starts(deployment)
    async with Load(deployment.url, MODEL, clients=20, tokens=200) as load:
        await eventually(load.streams)
        upgraded = await asyncio.to_thread(environment.run, deployment, "upgrade")
        assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr + deployment.text
        assert of_another(deployment, environment) == []
        assert not set(before.values()) & set(starts(deployment).values())
        status = await asyncio.to_thread(deployment.run, "status")
        assert "version 99.0.0" in status.stdout, status.stdout + status.stderr
        commands = [each["cmd"] for each in deployment.statefile()["components"].values()]
        assert all(each.startswith(str(environment.python)) for each in commands), commands
        old = serve_of(deployment)
        assert old
        old.kill()  # the one that comes back is of the new version, too
        await eventually(lambda: deployment.text.count("Adopted 7") == 2 and serve_of(deployment))
        assert of_another(deployment, environment) == []
        back = await asyncio.to_thread(deployment.run, "upgrade", timeout_s=240)
        assert back.returncode == 0, back.stdout + back.stderr
        await load.stop()
    print(f"{upgraded.stdout}{len(load.outcomes)} requests, {len(load.incomplete)} lost")
    assert load.incomplete == []
    assert is_whole(deployment)
    assert deployment.stop() == 0
    wait_until(lambda: not processes_of(deployment))
    assert files_of(deployment) == []


@pytest.mark.timeout(300)
async def test_the_old_version_goes_on_when_the_new_one_does_not_come_up(
    deploy: Callable[..., Deployment], environment: Environment, place: str
) -> None:
    module = environment.package / "fleet" / "serve.py"
    whole = module.read_text()
    arguments = ("graphs.disagg:Frontend", "disagg.yaml", *QUIET, "--working-dir", place)
    deployment = await asyncio.to_thread(deploy, *arguments, "--orphan-grace", "20")
    before = starts(deployment)
    async with Load(deployment.url, MODEL, clients=20, tokens=200) as load:
        await eventually(load.streams)
        for number, text in enumerate((BROKEN, "import time\ntime.sleep(600)\n"), 1):
            module.write_text(text)
            failed = await asyncio.to_thread(environment.run, deployment, "upgrade")
            assert failed.returncode == 1, failed.stdout + failed.stderr
            assert f"dynaplan {dynaplan.__version__}" in failed.stderr
            assert deployment.text.count("the one before starts again") == number
            await eventually(lambda: serve_of(deployment))
        module.write_text(whole)
        worker = environment.package / "worker" / "main.py"
        worker.write_text(BROKEN)
        partly = await asyncio.to_thread(environment.run, deployment, "upgrade", "--timeout", "20")
        assert partly.returncode == 1, partly.stdout + partly.stderr
        assert "of the old one still dynamo_Frontend, dynamo_VllmWorker" in partly.stderr
        back = await asyncio.to_thread(deployment.run, "upgrade", timeout_s=240)
        assert back.returncode == 0, back.stdout + back.stderr
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: is_whole(deployment))
    renewed = starts(deployment)
    assert len(renewed) == len(before)
    assert not set(before.values()) & set(renewed.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replaced", [0, 1, 2, 3])
async def test_an_upgrade_that_is_killed_in_any_phase_loses_nothing_and_the_next_one_ends_it(
    deploy: Callable[..., Deployment], environment: Environment, place: str, replaced: int
) -> None:
    """It is killed when ``serve`` (0) or that many workers have been replaced."""
    arguments = ("graphs.disagg:Frontend", "disagg.yaml", *QUIET, "--working-dir", place)
    deployment = await asyncio.to_thread(deploy, *arguments)
    before, old = starts(deployment), serve_of(deployment)

    def is_in_phase() -> bool:
        serve = serve_of(deployment)
        gone = len(set(before.values()) - set(starts(deployment).values()))
        return serve is not None and serve != old and gone >= replaced

    async with Load(deployment.url, MODEL, clients=8, tokens=200) as load:
        await eventually(load.streams)
        upgrade = await asyncio.create_subprocess_exec(
            *environment.command("upgrade"), env=deployment.environment, stdout=subprocess.DEVNULL
        )
        try:
            await eventually(is_in_phase, 60, 0.01)
        finally:
            upgrade.kill()
            await upgrade.wait()
        await eventually(lambda: is_whole(deployment))
        ended = await asyncio.to_thread(environment.run, deployment, "upgrade")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert of_another(deployment, environment) == []
        await load.stop()
    assert load.incomplete == []
    assert is_whole(deployment)


def test_what_cannot_be_upgraded_says_why(
    deploy: Callable[..., Deployment], environment: Environment, place: str
) -> None:
    arguments = ("graphs.agg:Frontend", "agg.yaml", "--working-dir", place)
    deployment = deploy(*arguments, "--no-supervise")
    refused = environment.run(deployment, "upgrade")
    assert refused.returncode == 2
    assert "has no supervisor" in refused.stderr
    assert deployment.stop() == 0
    deployment.command.remove("--no-supervise")
    deployment.command.append("--supervise")
    deployment.start()
    same = deployment.run("upgrade")
    assert same.returncode == 2
    assert f"runs dynaplan {dynaplan.__version__}" in same.stderr
    own = serve_of(deployment)
    assert own
    assert psutil.pid_exists(own.pid)
