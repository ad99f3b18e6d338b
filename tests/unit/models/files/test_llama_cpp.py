from __future__ import annotations

import pytest

from dynaplan.models.files import llama_cpp
from dynaplan.util.errors import ConfigError

PRESETS = """
; models of this box
version = 1

[*]
n-gpu-layers = 99
c = 8192
LLAMA_ARG_CACHE_TYPE_K = q8_0
jinja = true

[ggml-org/qwen:Q4]
model = /models/qwen.gguf
load-on-startup = on
parallel = 2
no-mmap = true
host = 0.0.0.0

[embed]
m = /models/e5.gguf
c = 512
embedding = true
stop-timeout = 10
"""


def test_sections_are_models_with_the_options_of_all_below_their_own() -> None:
    assert llama_cpp.is_presets(PRESETS)
    imported = llama_cpp.read_presets(PRESETS)
    assert {name: model.options for name, model in imported.models.items()} == {
        "ggml-org/qwen:Q4": {
            "engine": "llamacpp",
            "n-gpu-layers": 99,
            "ctx-size": 8192,
            "cache-type-k": "q8_0",
            "jinja": True,
            "model": "/models/qwen.gguf",
            "parallel": 2,
            "mmap": False,
        },
        "embed": {
            "engine": "llamacpp",
            "n-gpu-layers": 99,
            "ctx-size": 512,
            "cache-type-k": "q8_0",
            "jinja": True,
            "model": "/models/e5.gguf",
            "embeddings": True,
        },
    }
    assert imported.preload == ("ggml-org/qwen:Q4",)
    assert imported.notes == ("[embed] stop-timeout: a model finishes what it answers: `drain-deadline`.",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version = 2\n[a]\nm = x", "line 1: 'version = 2'"),
        ("[a]\nnothing", "line 2: 'nothing'"),
        ("[a]\nc = 5", r"\[a\] has no model"),
        ("[a]\nhf = org/model", r"\[a\] has hf-repo = org/model(?s:.*)fetches nothing"),
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
