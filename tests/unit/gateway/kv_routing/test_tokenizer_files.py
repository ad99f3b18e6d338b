"""A model's tokenizer and chat template are found by its path, or by its name where it was downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaplan.gateway.kv_routing.tokenizer_files import model_directory, read_chat_files


def test_a_path_is_a_model_when_it_has_a_tokenizer(tmp_path: Path) -> None:
    assert model_directory(str(tmp_path), {}) is None
    (tmp_path / "tokenizer.json").touch()
    assert model_directory(str(tmp_path), {}) == tmp_path
    assert model_directory(str(tmp_path / "tokenizer.json"), {}) is None
    assert model_directory("a\0b", {}) is None


@pytest.mark.parametrize("variable", ["HOME", "HF_HOME", "HF_HUB_CACHE"])
def test_a_name_is_found_where_the_hubs_library_keeps_it(tmp_path: Path, variable: str) -> None:
    below = {"HOME": ".cache/huggingface/hub", "HF_HOME": "hub", "HF_HUB_CACHE": ""}[variable]
    model = tmp_path / below / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").touch()
    assert model_directory("org/name", {variable: str(tmp_path)}) is None
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc\n")
    assert model_directory("org/name", {variable: str(tmp_path)}) == snapshot


def test_a_template_is_in_the_configuration_or_a_file_of_its_own_or_named(tmp_path: Path) -> None:
    assert read_chat_files(tmp_path).templates == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "of the configuration"}))
    assert read_chat_files(tmp_path).templates == {"default": "of the configuration"}
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert read_chat_files(tmp_path).templates == {"default": "of a file"}
    named = tmp_path / "own"
    named.write_text("of a named file")
    assert read_chat_files(tmp_path, str(named)).templates == {"default": "of a named file"}
    assert read_chat_files(tmp_path, "{{ bos_token }}").templates == {"default": "{{ bos_token }}"}


def test_a_model_may_have_several_templates(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": "c"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert read_chat_files(tmp_path).templates == {"default": "a", "tool_use": "b"}


def test_special_tokens_are_texts_or_objects_in_either_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<a>", "eos_token": "<e>"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<b>"}, "pad_token": None, "additional_special_tokens": ["<x>"]})
    )
    assert read_chat_files(tmp_path).special_tokens == {
        "bos_token": "<b>",
        "eos_token": "<e>",
        "additional_special_tokens": ["<x>"],
    }


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no object"):
        read_chat_files(tmp_path)
