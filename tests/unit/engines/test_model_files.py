"""Which models an engine is given, found out before anything starts; and what a refusal tells the user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dynaplan.engines.model_files import absolute_path, check_model, public_name
from dynaplan.util.errors import ConfigError
from tests.fakes.tiny_models import split_gguf

HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
"""The least that a GGUF file has: magic, version, and two counts."""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "some.model.gguf"
    path.write_bytes(HEADER)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    return path


def refusal(engine: str, model: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(engine, model)
    return str(caught.value)


def test_each_engine_takes_its_kind_of_model_without_a_word(gguf: Path, directory: Path) -> None:
    assert check_model("llamacpp", str(gguf)) == []
    for engine in ("vllm", "sglang", "trtllm"):
        assert check_model(engine, str(directory)) == []
    assert check_model("sim", "whatever/it-is-called") == []


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("model", [None, "", "  "])
def test_no_model_is_refused_saying_what_the_engine_takes(engine: str, model: str | None) -> None:
    message = refusal(engine, model)
    assert f"model is {model!r}" in message
    assert f"Engine {engine} takes the path of" in message


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("llamacpp", "gone.gguf"),
        ("llamacpp", "gone"),
        ("vllm", "./gone"),
        ("sglang", "/gone"),
        ("vllm", "~/x"),
        ("vllm", "~nobody-here/x"),
        ("llamacpp", "~nobody-here/m.gguf"),
    ],
)
def test_a_missing_path_is_refused(engine: str, name: str) -> None:
    message = refusal(engine, name)
    assert f"model is {name!r}, which does not exist" in message
    assert f"Engine {engine} takes" in message


def test_a_slip_in_a_path_gets_the_name_that_was_meant(gguf: Path, directory: Path) -> None:
    assert f"Did you mean {gguf}?" in refusal("llamacpp", str(gguf.with_name("some.modle.gguf")))
    assert f"Did you mean {directory}?" in refusal("vllm", str(directory.with_name("some-modl")))
    assert "There is no /nowhere-at-all either" in refusal("vllm", "/nowhere-at-all/model")


def test_the_other_engines_kind_of_model_is_refused_naming_the_engine_that_takes_it(
    gguf: Path, directory: Path
) -> None:
    assert "A GGUF file is for engine llamacpp" in refusal("vllm", str(gguf))
    assert "is a directory" in refusal("llamacpp", str(directory))
    assert "for engines vllm, sglang and trtllm" in refusal("llamacpp", str(directory))
    assert f"Name {directory}." in refusal("vllm", str(directory / "model.safetensors"))
    assert "vllm, sglang and trtllm take its directory" in refusal(
        "llamacpp", str(directory / "model.safetensors")
    )


def test_a_directory_of_gguf_files_is_answered_with_one_of_them(gguf: Path) -> None:
    assert f"Engine llamacpp takes {gguf}." in refusal("llamacpp", str(gguf.parent))
    assert f"Engine llamacpp takes {gguf}." in refusal("vllm", str(gguf.parent))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>", "is no GGUF file: it begins with b'<!DO'"),
        (b"GGUF", "is no whole GGUF file"),
        (HEADER[:20], "is no whole GGUF file"),
        (b"GGUF\0\0\0\x03" + bytes(16), "is no whole GGUF file"),
    ],
)
def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert expected in refusal("llamacpp", str(path))


def test_of_a_split_model_the_first_part_is_named_and_all_are_there(tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(HEADER)
    assert f"There is no {second.name}" in refusal("llamacpp", str(first))
    second.write_bytes(HEADER)
    assert check_model("llamacpp", str(first)) == []
    assert f"Name {first}." in refusal("llamacpp", str(second))


def test_every_part_of_a_split_model_is_checked_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    first, *others = split_gguf(tmp_path)
    assert check_model("llamacpp", str(first)) == []
    others[-1].write_bytes(others[-1].read_bytes()[:-100])
    assert f"model is '{others[-1]}', which is cut off" in refusal("llamacpp", str(first))


@pytest.mark.parametrize(
    ("config", "expected"),
    [(None, "has no config.json"), ("{", "is no JSON"), ("[]", "is no JSON object"), ("\0", "is no JSON")],
)
def test_a_directory_that_is_no_model_is_refused(directory: Path, config: str | None, expected: str) -> None:
    (directory / "config.json").unlink()
    if config is not None:
        (directory / "config.json").write_text(config)
    assert expected in refusal("vllm", str(directory))


def test_a_directory_of_mistrals_own_kind_is_a_model(directory: Path) -> None:
    (directory / "config.json").rename(directory / "params.json")
    assert check_model("vllm", str(directory)) == []


def test_a_hub_cache_is_answered_with_the_snapshot_in_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert f"Did you mean {snapshot}?" in refusal("vllm", str(tmp_path / "models--org--name"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(gguf: Path) -> None:
    gguf.chmod(0)
    assert "cannot be read: Permission denied" in refusal("llamacpp", str(gguf))


def test_a_read_error_is_refused_with_its_reason(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    assert "cannot be read: Permission denied" in refusal("llamacpp", str(gguf))


def test_a_name_of_the_hub_is_the_engines_to_look_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = check_model("vllm", "meta-llama/Llama-3.1-8B-Instruct")
    assert "vllm will look it up on the Hugging Face hub" in warning
    assert check_model("vllm", "s3://bucket/model") == []
    assert "does not exist" in refusal("vllm", "models/deep/below")
    assert "does not exist" in refusal("llamacpp", "meta-llama/Llama-3.1-8B-Instruct")


def test_a_name_that_is_also_a_directory_here_is_that_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    assert check_model("vllm", directory.name) == []
    assert absolute_path("vllm", directory.name, directory.parent) == str(directory)


def test_a_path_becomes_absolute_and_a_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home-of-somebody")

    def absolute(engine: str, model: str) -> object:
        return absolute_path(engine, model, tmp_path)

    assert absolute("llamacpp", "m.gguf") == str(tmp_path / "m.gguf")
    assert absolute("llamacpp", "~/m.gguf") == "/home-of-somebody/m.gguf"
    assert absolute("llamacpp", "~nobody-here/m.gguf") == str(tmp_path / "~nobody-here/m.gguf")
    assert absolute("vllm", "./m") == str(tmp_path / "m")
    assert absolute("vllm", "../m") == str(tmp_path.parent / "m")
    assert absolute("vllm", "/m") == "/m"
    assert absolute("vllm", "org/name") == "org/name"
    assert absolute("sim", "./m") == "./m"


@pytest.mark.parametrize(
    ("engine", "model", "name"),
    [
        ("llamacpp", "/m/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("llamacpp", "/m/big-00001-of-00003.gguf", "big"),
        ("vllm", "/m/Llama-3.1-8B", "Llama-3.1-8B"),
        ("vllm", "/m/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("vllm", "meta-llama/Llama-3.1-8B", ""),
        ("sim", "/m/x", ""),
    ],
)
def test_the_public_name_of_a_path_is_its_last_part(engine: str, model: str, name: str) -> None:
    assert public_name(engine, model) == name


def test_a_model_that_is_nowhere_is_answered_with_the_option_that_names_it(tmp_path: Path) -> None:
    assert "Write --Common.model=PATH." in refusal("llamacpp", str(tmp_path / "model.gguf"))


def test_a_name_on_the_hub_is_no_path_for_llamacpp(tmp_path: Path) -> None:
    with_kind = "unsloth/Qwen3-30B-A3B-GGUF:UD-Q4_K_XL"
    assert absolute_path("llamacpp", with_kind, tmp_path) == with_kind
    name = absolute_path("llamacpp", "Qwen/Qwen3-0.6B", tmp_path)
    assert name == "Qwen/Qwen3-0.6B"
    message = refusal("llamacpp", name)
    assert "names on the hub" in message
    assert str(tmp_path) not in message
    assert "--Common.model=PATH" in message
    assert "-f vllm.yaml" in message
    (tmp_path / "Qwen").mkdir()
    assert absolute_path("llamacpp", "Qwen/Qwen3-0.6B", tmp_path) == str(tmp_path / "Qwen/Qwen3-0.6B")
