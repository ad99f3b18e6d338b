from __future__ import annotations

import pytest

from dynaplan.models.files import llama_cpp
from dynaplan.util.errors import ConfigError

PRESETS = """
; models of this box
version = 1

[*]
n-gpu-layers = all  ; of each
c = 8192
LLAMA_ARG_CACHE_TYPE_K = q8_0
jinja = true
flash-attn = on

[ggml-org/qwen:Q4]
model = /models/my qwen.gguf
load-on-startup = on
parallel = 2
no-mmap = 1
mlock = false
host = 0.0.0.0

[embed]
m = /models/e5.gguf  # small
c = 0
embedding = true
jinja = off
stop-timeout = 10

[ggml-org/other-GGUF:Q8_0]
temp = 0.6
"""


def test_sections_are_the_commands_that_the_router_would_run() -> None:
    assert llama_cpp.is_presets(PRESETS)
    imported = llama_cpp.read_presets(PRESETS)
    assert {name: model.options for name, model in imported.models.items()} == {
        "ggml-org/qwen:Q4": {
            "command": "llama-server --n-gpu-layers all --ctx-size 8192 --cache-type-k q8_0 --jinja "
            "--flash-attn on --model '/models/my qwen.gguf' --parallel 2 --no-mmap",
        },
        "embed": {
            "command": "llama-server --n-gpu-layers all --ctx-size 0 --cache-type-k q8_0 --no-jinja "
            "--flash-attn on --model /models/e5.gguf --embeddings",
        },
        "ggml-org/other-GGUF:Q8_0": {
            "command": "llama-server --hf-repo ggml-org/other-GGUF:Q8_0 --n-gpu-layers all --ctx-size 8192 "
            "--cache-type-k q8_0 --jinja --flash-attn on --temp 0.6",
        },
    }
    assert imported.preload == ("ggml-org/qwen:Q4",)
    assert imported.notes == ("[embed] stop-timeout: a model finishes what it answers: `drain-deadline`.",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("versions = 2\n[a]\nm = x", "line 1: 'versions = 2'"),
        ("[a]\nnothing", "line 2: 'nothing'"),
        ("[a]\nc = 5", r"\[a\] has no model"),
        ("version = 1\n[*]\nc = 5", "has no model"),
    ],
)
def test_a_mistake_in_a_preset_file_says_where(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        llama_cpp.read_presets(text)


@pytest.mark.parametrize("text", ["", "models:\n  a: b", "# comment\nkey = value", "version: 1"])
def test_other_texts_are_not_taken_for_presets(text: str) -> None:
    assert not llama_cpp.is_presets(text)


def test_a_directory_has_a_model_for_each_file_and_each_sub_directory() -> None:
    files = [
        "qwen.gguf",
        "README.md",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
        "vision/mmproj-F16.gguf",
        "vision/vision-00001-of-00002.gguf",
        "vision/vision-00002-of-00002.gguf",
        "only-projector/mmproj.gguf",
    ]
    imported = llama_cpp.read_directory("/models", files)
    assert {name: model.options for name, model in imported.models.items()} == {
        "big-00001-of-00002": {"engine": "llamacpp", "model": "/models/big-00001-of-00002.gguf"},
        "qwen": {"engine": "llamacpp", "model": "/models/qwen.gguf"},
        "vision": {
            "engine": "llamacpp",
            "model": "/models/vision/vision-00001-of-00002.gguf",
            "mmproj": "/models/vision/mmproj-F16.gguf",
        },
    }


def test_sub_directories_of_one_name_are_models_of_two() -> None:
    files = ["a/qwen/x.gguf", "b/qwen/x.gguf", "vision.gguf", "vision/x.gguf"]
    imported = llama_cpp.read_directory("/models", files)
    assert {name: model.options["model"] for name, model in imported.models.items()} == {
        "qwen": "/models/a/qwen/x.gguf",
        "b-qwen-x": "/models/b/qwen/x.gguf",
        "vision": "/models/vision.gguf",
        "vision-x": "/models/vision/x.gguf",
    }


def test_a_directory_without_models_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/models holds no .gguf file"):
        llama_cpp.read_directory("/models", [])
