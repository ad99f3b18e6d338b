"""A model's name means the file that ``pull``, Ollama, Hugging Face, LM Studio or llama.cpp has here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaplan.cli.service_options import engine_of_model, is_model
from dynaplan.engines.local_models import find_model, locate_entries
from dynaplan.engines.pulled_models import CATALOGUE
from dynaplan.engines.registry import model_location
from dynaplan.util.errors import ConfigError, SeveralErrors, all_faults

GGUF = b"GGUF\x03\0\0\0" + bytes(16)


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(GGUF + str(path).encode())
    return path


def ollama(home: Path, name: str, tag: str, owner: str = "library") -> Path:
    """Write a manifest and a blob as Ollama does."""
    blob = gguf(home / ".ollama/models/blobs" / f"sha256-{owner}{name}{tag}")
    manifest = home / ".ollama/models/manifests/registry.ollama.ai" / owner / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": blob.name.replace("-", ":", 1)},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (
            ".cache/huggingface/hub/models--Qwen--Qwen3-GGUF/snapshots/abc/Qwen3-Q4_K_M.gguf",
            ["Qwen/Qwen3-GGUF", "qwen/qwen3-gguf:q4_k_m", "hf.co/Qwen/Qwen3-GGUF", "Qwen3-Q4_K_M"],
        ),
        (
            ".lmstudio/models/bartowski/Qwen3-GGUF/Qwen3-Q8_0.gguf",
            ["bartowski/Qwen3-GGUF", "bartowski/Qwen3-GGUF:Q8_0", "Qwen3-Q8_0.gguf"],
        ),
        (".cache/llama.cpp/ggml-org_gemma-3-GGUF_gemma-3-Q4_0.gguf", ["ggml-org/gemma-3-GGUF:Q4_0"]),
        (
            ".cache/lm-studio/models/a/b/big-Q4_0-00001-of-00002.gguf",
            ["a/b", "a/b:Q4_0", "big-Q4_0"],
        ),
    ],
)
def test_a_file_of_another_tool_is_found_by_the_names_that_the_tool_has_for_it(
    home: Path, place: str, names: list[str]
) -> None:
    file = gguf(home / place)
    gguf(file.with_name("mmproj-f16.gguf"))
    for name in names:
        found = find_model(name, home, {"HOME": str(home)})
        assert found and found.path == file, name
        assert model_location("llamacpp", name, home) == (str(file), name)
        assert is_model(name)
        assert engine_of_model(name) == "llamacpp"


def test_a_model_of_ollama_is_its_blob_and_keeps_its_name_for_clients(home: Path) -> None:
    small, large = ollama(home, "qwen3", "latest"), ollama(home, "qwen3", "8b")
    own = ollama(home, "tuned", "v2", owner="me")
    for name, blob in {"qwen3": small, "qwen3:latest": small, "qwen3:8b": large, "me/tuned:v2": own}.items():
        assert model_location("llamacpp", name, home) == (str(blob), name)
    assert find_model("qwen3:70b", home, {"HOME": str(home)}) is None


def test_a_name_of_several_files_is_answered_with_the_names_to_choose_from(home: Path) -> None:
    for kind in ("Q4_K_M", "Q8_0"):
        gguf(home / f".lmstudio/models/a/b/model-{kind}.gguf")
    with pytest.raises(ConfigError) as refused:
        model_location("llamacpp", "a/b", home)
    assert "a/b:Q4_K_M" in refused.value.hint
    assert "a/b:Q8_0" in refused.value.hint


def test_the_same_file_in_two_places_is_no_choice(home: Path) -> None:
    file = gguf(home / ".lmstudio/models/a/b/model-Q8_0.gguf")
    link = home / ".cache/huggingface/hub/models--a--b/snapshots/1/model-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(file)
    assert find_model("a/b", home, {"HOME": str(home)}) is not None


def test_what_was_pulled_comes_before_what_ollama_calls_the_same(home: Path) -> None:
    ollama(home, "smollm2", "latest")
    assert model_location("llamacpp", "smollm2", home)[0].startswith(str(home / ".ollama"))
    pulled = gguf(home / ".cache/dynaplan/models" / CATALOGUE["smollm2"].file)
    assert model_location("llamacpp", "smollm2", home) == (str(pulled), "smollm2")
    (home / "smollm2").write_bytes(GGUF)
    assert model_location("llamacpp", "smollm2", home)[0] == str(home / "smollm2")


def located_entries(entries: dict[str, dict[str, str]], home: Path) -> dict[str, dict[str, str]]:
    with all_faults() as faults:
        return locate_entries({"Models": entries}, home, {"HOME": str(home)}, faults)["Models"]


def test_an_entry_of_models_may_name_what_serve_may(home: Path) -> None:
    blob = ollama(home, "qwen3", "latest")
    pulled = gguf(home / ".cache/dynaplan/models" / CATALOGUE["smollm2"].file)
    entries = {
        "small": {"model": "smollm2"},
        "blob": {"model": str(blob)},
        "qwen": {"model": "qwen3", "engine": "llamacpp"},
        "hub": {"model": "org/name"},
        "own": {"command": "server --port ${PORT}", "model": "smollm2"},
    }
    located = located_entries(entries, home)
    assert located["small"] == {"model": str(pulled), "engine": "llamacpp"}
    assert located["blob"] == {"model": str(blob), "engine": "llamacpp"}
    assert located["qwen"] == {"model": str(blob), "engine": "llamacpp"}
    assert (located["hub"], located["own"]) == (entries["hub"], entries["own"])


def test_every_name_of_a_file_that_no_place_has_is_told_with_the_nearest_one(home: Path) -> None:
    ollama(home, "qwen3", "8b")
    entries = {"a": {"model": "qwen3:8"}, "b": {"model": "smolm2"}}
    with pytest.raises(SeveralErrors) as refused:
        located_entries(entries, home)
    text = str(refused.value)
    assert "Models.a: model is 'qwen3:8', which is not on this machine" in text
    assert "Did you mean 'qwen3:8b'?" in text
    assert "\nError: Models.b: model is 'smolm2'" in text
    assert "Did you mean 'smollm2'?" in text
