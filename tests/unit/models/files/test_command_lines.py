from __future__ import annotations

import shlex
from typing import Any

import pytest

from dynaplan.models.files.command_lines import recognise


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "llama-server -m a.gguf -c 4096 --temp 0.7 --warmup false --port 8080 -a name",
            {
                "engine": "llamacpp",
                "llama-server": "llama-server",
                "model": "a.gguf",
                "ctx-size": 4096,
                "temp": 0.7,
                "warmup": False,
            },
        ),
        (
            "/opt/llama-server --model=a.gguf --lora x --lora y -n -1 -ngl 0",
            {
                "engine": "llamacpp",
                "llama-server": "/opt/llama-server",
                "model": "a.gguf",
                "lora": ["x", "y"],
                "n-predict": -1,
                "n-gpu-layers": 0,
            },
        ),
        ("vllm serve org/model", {"engine": "vllm", "model": "org/model"}),
        ("vllm serve --model m --served-model-name x", {"engine": "vllm", "model": "m"}),
        (
            "/venv/bin/vllm serve m --no-enable-prefix-caching",
            {
                "engine": "vllm",
                "model": "m",
                "enable-prefix-caching": False,
                "vllm-command": ["/venv/bin/vllm", "serve"],
            },
        ),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model m",
            {
                "engine": "vllm",
                "model": "m",
                "vllm-command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
            },
        ),
    ],
)
def test_the_flags_of_an_engine_are_options_of_the_same_name(command: str, expected: dict[str, Any]) -> None:
    assert recognise(shlex.split(command)) == expected


@pytest.mark.parametrize(
    "command",
    [
        "",
        "docker run image llama-server -m a.gguf",
        "llama-server",
        "llama-server -hf org/model",
        "llama-server -m a.gguf extra words",
        "llama-server -m a.gguf -unknown 3",
        "vllm bench",
        "vllm serve",
        "vllm serve m -x",
        "python3 -m other --model m",
        "mlx_lm.server --model m",
    ],
)
def test_what_is_not_recognised_stays_a_command(command: str) -> None:
    assert recognise(shlex.split(command)) is None
