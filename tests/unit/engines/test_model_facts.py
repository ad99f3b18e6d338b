"""What clients are told of a model, by its files and its worker's options."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from dynaplan.engines.gguf import read_description
from dynaplan.engines.model_facts import model_path, read_facts
from tests.unit.engines.test_gguf import array, number, tensor, text

TEMPLATE = "{% if tools %}" + "x" * 2000 + "<think>{% endif %}"


def string(name: str, value: str) -> bytes:
    return text(name) + struct.pack("<I", 8) + text(value)


def gguf(directory: Path, *pairs: bytes, name: str = "model.gguf") -> Path:
    """A file with these keys, and two tensors of 6 and 4 values."""
    tensors = tensor("a", 0, 0, 2, 3) + tensor("b", 0, 32, 4)
    path = directory / name
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, len(pairs)) + b"".join(pairs) + tensors + b"\0" * 96)
    return path


CHAT = (
    string("general.architecture", "qwen2"),
    number("general.file_type", 15),
    array("tokenizer.ggml.tokens", 8, 3, text("a") + text("b") + text("c")),
    number("tokenizer.ggml.fim_pre_token_id", 1),
    string("tokenizer.chat_template", TEMPLATE),
)


def facts(path: Path, **options: Any) -> Any:
    return read_facts("m", {"model": str(path), **options})


def test_the_header_behind_the_vocabulary_is_read_to_its_end(tmp_path: Path) -> None:
    described = read_description(gguf(tmp_path, *CHAT))
    assert (described.parameters, described.chat_template) == (10, TEMPLATE)
    assert described.metadata["tokenizer.ggml.fim_pre_token_id"] == 1


def test_a_file_tells_its_kind_size_and_age(tmp_path: Path) -> None:
    path = gguf(tmp_path, *CHAT)
    os.utime(path, (60, 60))
    found = facts(path)
    assert (found.family, found.quantization, found.format) == ("qwen2", "Q4_K_M", "gguf")
    assert (found.size_bytes, found.modified_unix_s, found.parameters) == (path.stat().st_size, 60, 10)


def test_a_digest_is_that_of_the_content_where_the_name_has_it_else_stays_until_the_file_changes(
    tmp_path: Path,
) -> None:
    path = gguf(tmp_path, *CHAT)
    before = facts(path).digest
    assert (before, len(before)) == (facts(path).digest, 64)
    os.utime(path, (60, 60))
    assert facts(path).digest != before
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    blob = path.rename(tmp_path / f"sha256-{content}")
    (tmp_path / "link.gguf").symlink_to(blob)
    assert facts(blob).digest == facts(tmp_path / "link.gguf").digest == content


@pytest.mark.parametrize(
    ("pairs", "options", "capabilities"),
    [
        (CHAT, {}, {"completion", "tools", "insert", "thinking"}),
        (CHAT[:2], {}, {"completion"}),
        (CHAT[:2], {"mmproj": "/m/mmproj.gguf"}, {"completion", "vision"}),
        (CHAT[:2], {"embedding": True}, {"embedding"}),
        ((string("general.architecture", "bert"), number("bert.pooling_type", 1)), {}, {"embedding"}),
    ],
)
def test_capabilities_follow_the_header_the_template_and_the_workers_options(
    tmp_path: Path, pairs: tuple[bytes, ...], options: dict[str, Any], capabilities: set[str]
) -> None:
    assert set(facts(gguf(tmp_path, *pairs), **options).capabilities) == capabilities


@pytest.mark.parametrize("flag", ["-m {}", "--model {}", "--model={}"])
def test_the_model_of_a_command_is_found_in_its_words(tmp_path: Path, flag: str) -> None:
    path = gguf(tmp_path, *CHAT)
    options = {"command": f"llama-server {flag.format(path)} --embeddings --port ${{PORT}}"}
    assert model_path(options) == path
    assert read_facts("m", options).capabilities[0] == "embedding"


@pytest.mark.parametrize("options", [{}, {"model": "org/name"}, {"command": "server --port ${PORT}"}])
def test_a_model_without_a_file_has_a_digest_of_its_name(options: dict[str, Any]) -> None:
    found = read_facts("m", options)
    assert (found.digest, found.size_bytes) == (hashlib.sha256(b"m").hexdigest(), 0)
    assert found.capabilities == ("completion",)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"x" * 100])
def test_a_file_that_cannot_be_read_is_told_by_its_size_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert (facts(path).size_bytes, facts(path).family) == (len(content), "")
