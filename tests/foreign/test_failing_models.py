"""How the life of a foreign program ends: it fails, and says so to those who asked for it."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path

import pytest

from tests.foreign.two_gpus.box import ask, models, two_gpus

FAILING = """
Models:
  bad:
    command: "sh -c 'echo no such lora >&2; exit 78' ${PORT}"
    memory: 100MB
  behind:
    command: "sh -c 'sleep 100 & exit 0' ${PORT}"
    memory: 100MB
"""


def test_a_program_that_fails_is_answered_with_its_last_lines(tmp_path: Path) -> None:
    with two_gpus(tmp_path, FAILING) as deployment:
        deployment.start()
        with pytest.raises(urllib.error.HTTPError) as failed:
            ask(deployment, "bad")
        said = json.load(failed.value)["error"]["message"]
        assert said.startswith("bad: its program ended before it answered, after 2 restarts")
        assert said.endswith("Its last lines:\nno such lora")
        assert models(deployment)["bad"]["state"] == "failed"
        assert "no such lora" in deployment.run("models").stdout
        with pytest.raises(urllib.error.HTTPError) as failed:
            ask(deployment, "behind")
        said = json.load(failed.value)["error"]["message"]
        assert "it must stay in the foreground" in said
