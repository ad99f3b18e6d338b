"""What a user sees first: one command, one curl, and the tools they know."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.load import Outcome, stream_one


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("answers")) as deployment:
        yield deployment.start()


async def answer(url: str, prompt: str = "Hello", tokens: int = 8) -> Outcome:
    async with aiohttp.ClientSession() as session:
        return await stream_one(session, url, MODEL, prompt, tokens)


def post(url: str, body: bytes) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_banner_says_where_everything_is(running: Deployment) -> None:
    text = running.text
    for part in (
        running.url,
        str(running.statefile_path),
        "circusctl --endpoint ipc://",
        "tensorboard --logdir",
        "curl",
    ):
        assert part in text


def test_a_chat_completion_streams_to_its_end(running: Deployment) -> None:
    assert asyncio.run(answer(running.url)).is_complete


def test_a_long_prompt_is_prefilled_by_the_prefill_worker(running: Deployment) -> None:
    assert asyncio.run(answer(running.url, "word " * 3000)).is_complete
    log = Path(running.statefile()["addresses"]["log_dir"]) / "dynamo_PrefillWorker.log"
    metrics = urllib.request.urlopen(f"{running.url}/metrics", timeout=10).read().decode()
    assert any(
        "remote" in line and not line.startswith("#") and not line.endswith(" 0.0")
        for line in metrics.splitlines()
    )
    assert log.exists()


def test_a_completion_without_streaming_tells_its_usage(running: Deployment) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    status, document = post(f"{running.url}/v1/completions", json.dumps(body).encode())
    assert status == 200
    usage = document["usage"]
    assert isinstance(usage, dict)
    assert usage["completion_tokens"] == 5


def test_models_names_the_model_of_the_yaml(running: Deployment) -> None:
    assert [model["id"] for model in running.get_json("/v1/models")["data"]] == [MODEL]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": "word " * 200_000}).encode(), 400),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": 7}).encode(), 400),
    ],
)
def test_a_wrong_request_is_answered_in_the_openai_shape(
    running: Deployment, path: str, body: bytes, status: int
) -> None:
    code, document = post(running.url + path, body)
    error = document["error"]
    assert code == status
    assert isinstance(error, dict)
    assert error["message"]


@pytest.mark.parametrize(
    "command", [["list"], ["status"], ["stats"], ["numprocesses"], ["options", "dynamo_VllmWorker"]]
)
def test_circusctl_works_with_the_printed_endpoint(running: Deployment, command: list[str]) -> None:
    endpoint = running.statefile()["circus_endpoint"]
    circusctl = Path(sys.executable).with_name("circusctl")
    result = subprocess.run(
        [circusctl, "--endpoint", endpoint, "--timeout", "10", *command],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if command[0] in ("list", "status"):
        assert "dynamo_vllmworker" in result.stdout.lower()


def test_status_shows_every_worker_as_a_table_and_as_json(running: Deployment) -> None:
    table = running.run("status")
    assert table.returncode == 0, table.stderr
    assert "dynamo_VllmWorker" in table.stdout and "ready" in table.stdout
    workers = {
        worker["worker"]: worker for worker in json.loads(running.run("status", "--json").stdout)["workers"]
    }
    decode = workers["dynamo_VllmWorker"]
    assert decode["role"] == "decode"
    assert decode["state"] == "ready"
    assert len(decode["gpus"]) == 1
    assert decode["kv_usage"] is not None


def test_why_explains_the_last_decisions_in_words(running: Deployment) -> None:
    result = running.run("why")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_logs_shows_what_a_worker_wrote(running: Deployment) -> None:
    result = running.run("logs", "dynamo_VllmWorker")
    assert result.returncode == 0, result.stderr
    assert "registered" in result.stdout
