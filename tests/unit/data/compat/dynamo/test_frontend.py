from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dynaplan.graph.loading import compat_environment


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dynamo.frontend", "--router-mod", "kv"], "No such option '--router-mod'"),
        (["dynamo.vllm", "--endpoint=dyn://a.b.c"], "--endpoint of the original has no counterpart here"),
    ],
)
def test_a_flag_that_nobody_has_is_named(words: list[str], expected: str) -> None:
    command = [sys.executable, "-m", *words]
    run = subprocess.run(command, env=compat_environment(os.environ), capture_output=True, text=True)
    assert run.returncode == 2
    assert expected in run.stderr
