"""A stranger's command is run as it stands: what of it arrives at the program, and what ends with it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until
from tests.fakes.tiny_models import tiny_gguf

BIN = Path(__file__).parent / "tools" / "bin"

CONFIG = """
macros: {{base: "llama-server --port ${{PORT}} -ngl 99 -c 4096"}}
models:
  plain: {{cmd: "llama-server -m {model} -c 4096 -ngl 30", env: [LLAMA_ARG_THREADS=3, "SELF=:${{PORT}}"]}}
  repeated: {{cmd: "${{base}} -m {model} -c 8192 -np 1 --host 0.0.0.0 -a his --metrics"}}
  wrapped: {{cmd: "WORD=1 nice -n 3 env OTHER=2 ${{base}} -m {model}"}}
  secret: {{cmd: "HF_TOKEN=never-shown llama-server -m {model} -hft not-this --api-key nor-this"}}
  loud: {{cmd: "llama-server -m {model} --flood 60"}}
  shell: {{cmd: "bash -c 'llama-server -m {model} --port ${{PORT}} & wait'"}}
"""


def serving(directory: Path, config: str, name: str = "config.yaml") -> Deployment:
    (directory / name).write_text(config)
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return Deployment(directory, str(directory / name), "", environment=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    with serving(tmp_path_factory.mktemp("commands"), CONFIG.format(model=model)) as made:
        yield made.start()


def ask(deployment: Deployment, name: str) -> dict[str, Any]:
    """Ask the model; return what its program says of its start."""
    body = {"model": name, "messages": [{"role": "user", "content": "how were you started?"}]}
    request = urllib.request.Request(
        f"{deployment.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(json.load(response)["choices"][0]["message"]["content"]))


def port(said: dict[str, Any]) -> str:
    words: list[str] = said["words"]
    return words[words.index("--port") + 1]


def test_the_words_stand_in_their_order_and_only_what_nobody_notices_is_added(
    deployment: Deployment, model: Path
) -> None:
    said = ask(deployment, "plain")
    words = said["words"]
    address = ["--host", "127.0.0.1", "--port", port(said)]
    assert words[:10] == ["-m", str(model), "-c", "4096", "-ngl", "30", *address]
    assert words[10:13] == ["--alias", "plain", "--metrics"]
    assert words[13] == "--slot-save-path" and len(words) == 15
    assert said["variables"]["LLAMA_ARG_THREADS"] == "3"
    assert said["variables"]["SELF"] == f":{port(said)}"


def test_the_last_of_a_flag_counts_and_what_the_owner_set_is_not_set_again(
    deployment: Deployment, model: Path
) -> None:
    said = ask(deployment, "repeated")
    assert said["words"][:-2] == [
        *("--port", port(said), "-ngl", "99", "-c", "4096", "-m", str(model), "-c", "8192", "-np", "1"),
        *("--host", "127.0.0.1", "-a", "his", "--metrics"),
    ]
    assert wait_until(lambda: context_tokens(deployment).get("repeated:latest")) == 8192


def context_tokens(deployment: Deployment) -> dict[str, int]:
    """Return the context of each loaded model, as its server says it."""
    with urllib.request.urlopen(f"{deployment.url}/api/ps", timeout=10) as response:
        return {each["name"]: each["context_length"] for each in json.load(response)["models"]}


def logs(deployment: Deployment, model: str) -> list[Path]:
    return list((deployment.directory / ".dynamo" / "logs").rglob(f"*{model}*.log*"))


def test_behind_programs_that_become_it_the_engine_is_recognised(deployment: Deployment) -> None:
    said = ask(deployment, "wrapped")
    assert (said["variables"]["WORD"], said["variables"]["OTHER"]) == ("1", "2")
    assert "--metrics" in said["words"]
    assert os.getpriority(os.PRIO_PROCESS, said["pid"]) == 3


def test_its_key_is_not_the_engines_and_no_secret_of_it_is_in_a_log_or_the_statefile(
    deployment: Deployment,
) -> None:
    said = ask(deployment, "secret")
    assert said["variables"]["HF_TOKEN"] == "never-shown"
    assert "not-this" in said["words"] and "nor-this" not in said["words"]
    shown = deployment.statefile_path.read_text() + deployment.text
    shown += "".join(each.read_text(errors="replace") for each in logs(deployment, "secret"))
    assert "starting llamacpp" in shown
    assert not [each for each in ("never-shown", "not-this", "nor-this") if each in shown]


def test_a_program_that_prints_much_does_not_fill_the_disk(deployment: Deployment) -> None:
    ask(deployment, "loud")
    files = logs(deployment, "loud")
    assert 20_000_000 < sum(each.stat().st_size for each in files) < 45_000_000
    wait_until(lambda: any("the log was full" in each.read_text() for each in logs(deployment, "loud")))


def test_what_a_shell_leaves_in_the_background_ends_with_the_model(deployment: Deployment) -> None:
    pid = ask(deployment, "shell")["pid"]
    assert deployment.run("unload", "shell").returncode == 0
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


PRESETS = """
version = 1
[*]
n-gpu-layers = all  ; of each
mmap = 0
[one]
model = {model}
ctx-size = 2048
temp = 0.6
"""


def test_a_preset_is_the_command_that_the_router_would_run(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, PRESETS.format(model=model), "models.ini") as deployment:
        said = ask(deployment.start(), "one")
        assert said["words"][:9] == [
            *("--n-gpu-layers", "all", "--no-mmap", "--model", str(model)),
            *("--ctx-size", "2048", "--temp", "0.6"),
        ]
        assert not {"--parallel", "--threads", "--batch-size", "--no-webui"} & set(said["words"])
