"""A user who has nothing but README.md follows it from the top: every command does what it says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.readme import REAL_MODEL, Shell, commands
from tests.fakes.polling import PATIENCE_S, wait_until

NOT_RUN = {
    "pip install -e .": "tox has done it",
    "pip install -e '.[llamacpp]'": "tox has done it",
    "pip install --require-hashes -r requirements.lock": "tests/unit/house/test_lock.py looks at the lock",
    "pip install --no-deps -e .": "tox has done it",
    "pip install tox": "tox has done it",
    "tox": "this is run by it",
    "tox -e gpu": "needs a GPU; tests/e2e/test_gpu_report.py runs its parts",
    "tox -e vllm": "downloads 1 GiB",
    "dynaplan profile-sla --config disagg.yaml --output-dir profiling_results": "takes minutes; "
    "tests/e2e/test_profile_sla.py runs it with fewer points",
    "dynaplan worker --namespace dynamo": "tests/e2e/test_components.py runs it, with serve and without",
    "dynaplan export kubernetes": "needs an image's name; tests/e2e/test_exported.py runs it",
    "dynaplan serve models.yaml": "names models of the user's; tests/e2e/test_models.py serves such a file",
    "dynaplan models": "shows what that file serves; tests/e2e/test_models.py runs it",
    "dynaplan top": "needs a keyboard; tests/integration/test_cli.py has one",
    "dynaplan frontend --namespace dynamo --port 8001": "tests/integration/test_components.py runs it",
}
"""Commands that cannot be run here, and why. Those of the real model are run by tests/llm/test_readme.py."""

FOLLOWS = {
    "dynaplan logs dynamo_VllmWorker -f": "VllmWorker",
    "tensorboard --logdir ~/.dynamo/logs/dynamo/planner": "http://",
}
"""Commands that go on until Ctrl-C, and a part of what they must print first."""

LOAD, DECISION = "dynaplan bench", "dynaplan why --changes"
"""The beginnings of the command that makes load, and of the one that shows the decision it brought about."""


@pytest.fixture
def shell(tmp_path: Path, tiny_gguf: Path) -> Iterator[Shell]:
    """The shell of a user who has fetched one model, by llama.cpp's ``-hf``, and trains another."""
    shell = Shell(tmp_path)
    models = tmp_path / ".cache" / "llama.cpp"
    models.mkdir(parents=True)
    shutil.copy(tiny_gguf, models / "owner_tiny_tiny.gguf")
    (tmp_path / "train.py").write_text("print('trained')")
    yield shell
    shell.close()


def test_no_exception_is_out_of_date() -> None:
    shown = commands()
    assert [command for command in (*NOT_RUN, *FOLLOWS) if command not in shown] == []
    assert any(command.startswith(LOAD) for command in shown)
    assert any(command.startswith(DECISION) for command in shown)


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_can_be_followed_as_they_are_written(shell: Shell) -> None:
    shown = dict.fromkeys(each for each in commands() if each not in NOT_RUN and REAL_MODEL not in each)
    serve = [each for each in shown if each.startswith("dynaplan serve") and "--dry-run" not in each]
    assert len(serve) == 2
    with shell.serving(serve[0]) as output:
        pass
    assert output.read_text().endswith("Stopped.\n")
    with ExitStack() as until_stopped, ExitStack() as until_decided:
        for command in shown:
            if command in serve:
                if command == serve[1]:
                    until_stopped.enter_context(shell.serving(command))
            elif command.startswith(LOAD):
                until_decided.enter_context(load(shell, command))
            elif command.startswith(DECISION):
                wait_until(lambda line=command: "changed" in shell.run(line), 3 * PATIENCE_S, 3.0)
                until_decided.close()
            elif command in FOLLOWS:
                with shell.running(command, FOLLOWS[command]):
                    pass
            else:
                printed = shell.run(command)
                assert "choices" in printed or not command.startswith("curl"), printed
                assert printed, command
    assert (shell.directory / "page.html").stat().st_size > 10_000


@contextmanager
def load(shell: Shell, command: str) -> Iterator[None]:
    """The command in the background, with all that it starts, until the block ends."""
    line = command.replace("127.0.0.1:8000", shell.address)
    process = subprocess.Popen(["bash", "-c", line], env=shell.environment, start_new_session=True)
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE_S)
