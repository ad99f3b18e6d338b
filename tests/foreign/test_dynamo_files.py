"""Configurations and graphs of the original, as its versions 0.2 and 0.3 have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynaplan.cli.main import main
from dynaplan.graph.loading import compat_environment

BENCHMARK_70B = """
Common: {model: org/R1-Distill-Llama-70B-FP8, block-size: 128, max-model-len: 3500}
Frontend: {served_model_name: org/R1, endpoint: dynamo.Processor.chat/completions, port: 8000}
Processor: {router: round-robin, common-configs: [model]}
VllmWorker:
  remote-prefill: true
  tensor-parallel-size: 4
  ServiceArgs: {workers: 1, resources: {gpu: 4}}
  common-configs: [model, block-size, max-model-len]
PrefillWorker:
  tensor-parallel-size: 1
  ServiceArgs: {workers: 4, resources: {gpu: 1}}
  common-configs: [model, block-size, max-model-len]
"""

IN_SECONDS = "Planner: {policy: sla, profile-results-dir: h100-bf16, ttft: 0.5, itl: 0.05}\n"

OF_SGLANG = """
SGLangWorker: {model-path: org/m, served-model-name: m, tp: 1, disaggregation-mode: prefill}
SGLangDecodeWorker: {model-path: org/m, served-model-name: m, tp: 1, disaggregation-mode: decode}
"""

OF_TRTLLM = "TensorRTLLMWorker: {engine_args: llm_api_config.yaml, ServiceArgs: {workers: 1}}\n"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            BENCHMARK_70B,
            ["PrefillWorker: no engine is named", "tensor-parallel-size 1", "engine: vllm", "2, 4, 8"],
        ),
        (IN_SECONDS, ["ttft is 0.5: 0.5 ms is no target", "Write ttft: 500"]),
        (OF_SGLANG, ["SGLangWorker: this graph has no such service", "`engine`", "-f sglang.yaml"]),
        (OF_TRTLLM, ["TensorRTLLMWorker", "`engine`", "-f trtllm.yaml"]),
    ],
)
def test_what_a_configuration_of_the_original_lacks_is_told_in_its_words(
    file: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "theirs.yaml").write_text(file)
    with pytest.raises(SystemExit):
        main(["serve", "graphs.disagg:Frontend", "-f", str(tmp_path / "theirs.yaml"), "--dry-run"])
    output = capfd.readouterr().err
    assert [each for each in words if each not in output] == [], output


GRAPH_OF_0_2 = """
from dynamo.sdk import async_on_start, async_on_shutdown, depends, dynamo_api, dynamo_endpoint, service
from dynamo.sdk.lib.config import ServiceConfig

@service(dynamo={"enabled": True, "namespace": "demo"}, image="any", resources={"cpu": "1"}, workers=1)
class Leaf:
    @dynamo_endpoint()
    async def say(self, request: dict):
        yield request["text"]

@service(dynamo={"enabled": True, "namespace": "demo"}, workers=1)
class Front:
    leaf = depends(Leaf)

    @async_on_start
    async def begin(self):
        self.begun = True

    @dynamo_endpoint(name="generate", is_api=True)
    async def generate(self, text: str):
        async for word in self.leaf.say({"text": text}):
            yield word

    @dynamo_api()
    async def other(self, text: str):
        yield text

Front.link(Leaf)
"""

NAMES_OF_0_2 = """
from dynamo.sdk.lib.decorators import async_on_start, dynamo_endpoint
from dynamo.sdk.lib.dependency import depends
from dynamo.sdk.lib.image import DYNAMO_IMAGE
from dynamo.sdk.lib.service import service
from dynamo.sdk.core.lib import DYNAMO_IMAGE, depends, service
"""


def test_a_graph_of_0_2_is_loaded_with_its_public_endpoints(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(GRAPH_OF_0_2)
    show = (
        "from pathlib import Path; from dynaplan.graph.config import resolve_graph; "
        "from dynaplan.graph.loading import load_graph; "
        "print(resolve_graph(load_graph('old:Front', Path.cwd()), {}).services[0].public_endpoints)"
    )
    for program, expected in ((show, "('generate', 'other')"), (NAMES_OF_0_2, "")):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=compat_environment({"PATH": "/usr/bin:/bin"}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == expected
