"""vLLM's other paths through the frontend, asked by the real ``openai`` client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import model_of


@pytest.fixture(scope="module")
def generating(deploy_vllm: Callable[..., Deployment]) -> Deployment:
    return deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), "--VllmWorker.max-num-seqs=8")


@pytest.fixture
def client(generating: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{generating.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_responses_lists_of_prompts_and_models(generating: Deployment, client: openai.OpenAI) -> None:
    model = model_of(generating)
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    asked: dict[str, Any] = {"model": model, "input": "Why?", "max_output_tokens": 6, "temperature": 0}
    answer = client.responses.create(**asked)
    assert answer.usage
    assert answer.usage.output_tokens == 6
    events = list(client.responses.create(**asked, stream=True))
    assert 0 < [event.type for event in events].count("response.output_text.delta") <= 6
    assert events[-1].type in ("response.completed", "response.incomplete")
    prompts: dict[str, Any] = {"model": model, "prompt": ["a", "b"], "max_tokens": 3, "temperature": 0}
    assert [choice.index for choice in client.completions.create(**prompts).choices] == [0, 1]
    streamed = {chunk.choices[0].index for chunk in client.completions.create(**prompts, stream=True)}
    assert streamed == {0, 1}


def test_tokens_and_what_a_generating_model_has_not(generating: Deployment, client: openai.OpenAI) -> None:
    model = model_of(generating)
    tokens = asked(generating, "/tokenize", model=model, prompt="a blue sky")["tokens"]
    assert asked(generating, "/detokenize", model=model, tokens=tokens)["prompt"].endswith("a blue sky")
    with pytest.raises(openai.NotFoundError, match="has no /v1/embeddings"):
        client.embeddings.create(model=model, input="x")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=messages)


def test_a_model_that_embeds(deploy_vllm: Callable[..., Deployment]) -> None:
    pooling = ("--VllmWorker.runner=pooling", "--VllmWorker.convert=embed")
    deployment = deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *pooling)
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=model_of(deployment), input=["blue", "sky", "blue"])
    vectors = [each.embedding for each in answer.data]
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-5)
    scores = asked(deployment, "/score", model=model_of(deployment), text_1="a", text_2=["a", "b"])
    assert len(scores["data"]) == 2


def asked(deployment: Deployment, path: str, **body: Any) -> Any:
    """The document that answers one request."""
    request = urllib.request.Request(deployment.url + path, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())
