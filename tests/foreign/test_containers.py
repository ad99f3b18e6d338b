"""A container is no child of ours: it outlives whoever has started it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.foreign.two_gpus.box import HERE, ask, two_gpus

CONFIG = """
models:
  one:
    cmd: docker run --rm --name one --gpus device=0 -p ${PORT}:8000 image --model org/one
    cmdStop: docker stop one
"""


def test_a_container_of_an_earlier_life_gives_its_name_to_the_next(tmp_path: Path) -> None:
    made = two_gpus(tmp_path, CONFIG)
    docker = [HERE / "bin" / "docker", "run", "--name", "one", "--gpus", "device=0", "-p", "0:8000", "image"]
    left = subprocess.Popen(docker, env=made.environment)
    try:
        deployment = made.start()
        assert "--rm" in ask(deployment, "one")["words"], "it is the new one that answers"
        left.wait(timeout=10)
    finally:
        made.close()
        left.terminate()
        left.wait()
