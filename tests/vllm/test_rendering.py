"""The router's tokens of a chat are those that vLLM computes, for the templates that vLLM ships."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from pathlib import Path

from tokenizers import Tokenizer

from dynaplan.gateway.kv_routing.chat_templates import ChatTemplates
from dynaplan.gateway.kv_routing.tokenizer_files import read_chat_files
from dynaplan.gateway.kv_routing.tokenizer_main import SegmentedTokenizer
from tests.e2e.deployment import REPOSITORY
from tests.vllm.conftest import ON_CPU, START_UP_S
from tests.vllm.rendering import BODIES


def test_a_chat_has_the_tokens_that_vllm_gives_it(vllm_python: Path, tiny_hf: Path) -> None:
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": str(REPOSITORY)}
    command = [str(vllm_python), "-m", "tests.vllm.rendering", str(tiny_hf)]
    answer = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=START_UP_S
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    tokenizer = SegmentedTokenizer(Tokenizer.from_file(str(tiny_hf / "tokenizer.json")))
    compared = 0
    for name, of_vllm in json.loads(answer.stdout.splitlines()[-1]).items():
        chats = ChatTemplates(read_chat_files(tiny_hf, of_vllm["template"]))
        for body, ids in zip(BODIES, of_vllm["ids"], strict=True):
            if ids is not None:
                compared += 1
                assert list(array("I", tokenizer.encode(chats.text(body)))) == ids, (name, body)
    assert compared > len(BODIES)
