"""vLLM's other paths through the frontend, asked by the real ``openai`` client."""

from __future__ import annotations

import json
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import model_of
from tests.fakes.tiny_models import WIDTH


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


def test_an_adapter_is_a_model_of_its_own(deploy_vllm: Callable[..., Deployment], tmp_path: Path) -> None:
    adapter = f"--VllmWorker.lora-modules=sql={lora(tmp_path)}"
    deployment = deploy_vllm(
        "graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), "--VllmWorker.enable-lora=true", adapter
    )
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        names = {each.id for each in client.models.list()}
        assert "sql" in names
        assert len(names) == 2
        assert client.models.retrieve("sql").id == "sql"
        answer = client.completions.create(model="sql", prompt="a", max_tokens=4)
    assert answer.model == "sql"


def lora(directory: Path) -> Path:
    """Write an adapter of rank 8 with large weights, in the form of Hugging Face's peft."""
    rank = 8
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    data, draws = b"", Random(1)
    for layer in range(2):
        for module, out in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            for part, shape in (("lora_A", (rank, WIDTH)), ("lora_B", (out, rank))):
                size = 4 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
                data += struct.pack(f"<{size // 4}f", *(draws.gauss(0, 0.5) for _ in range(size // 4)))
    text = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return directory


def asked(deployment: Deployment, path: str, **body: Any) -> Any:
    """The document that answers one request."""
    request = urllib.request.Request(deployment.url + path, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())
