"""Files of other tools, recognised by their form and served as models of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.cli import imported_models
from dynaplan.cli.imported_models import imported_file, read_config_file
from dynaplan.cli.serve import warn
from dynaplan.cli.service_options import is_models_file, models_overrides
from dynaplan.config.model_entries import components_of
from dynaplan.config.overrides import Sections, parse_overrides
from dynaplan.engines.command import KIND as COMMAND
from dynaplan.engines.llamacpp.launch_line import KIND as LLAMACPP
from dynaplan.engines.server.owners_command import KEYS
from dynaplan.graph.config import validate_config
from dynaplan.graph.loading import load_graph
from dynaplan.util.errors import ConfigError, all_faults


def read(file: Path, overrides: list[str]) -> tuple[Sections, list[str]]:
    with all_faults() as faults:
        return read_config_file(file, overrides, Path.cwd(), faults)


LLAMA_SWAP = """
healthCheckTimeout: 60
models:
  echo:
    cmd: echo-server --port ${PORT}
    useModelName: upstream
    unlisted: true
    filters: {stripParams: "top_k", setParams: {temperature: 0}}
  chat:
    cmd: some-server --port ${PORT}
groups: {one: {swap: true, members: [echo, chat]}}
hooks: {on_startup: {preload: [chat]}}
apiKeys: [first, second]
"""


def test_llama_swaps_file_becomes_models_with_its_constraints_and_says_what_is_left_out(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LLAMA_SWAP)
    config, notes = read(file, ["--Models.chat.ttl=5m"])
    echo, chat = config["Models"]["echo"], config["Models"]["chat"]
    assert (echo["command"], echo["upstream-name"], echo["unlisted"]) == (
        "echo-server --port '${PORT}'",
        "upstream",
        True,
    )
    assert (echo["strip-params"], echo["set-params"], echo["not-beside"]) == (
        ["top_k"],
        {"temperature": 0},
        ["chat"],
    )
    assert (chat["preload"], chat["ttl"], chat["load-timeout"]) == (True, "5m", 60)
    assert config["Frontend"] == {"api-key": "first", "further-api-key": ["second"]}
    assert any("llama-swap: 2 models" in each for each in notes)


DOCUMENTED = Path(__file__).parents[2] / "fixtures" / "llama_swap.yaml"


def test_a_file_with_every_key_that_llama_swap_documents_is_served_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_KEY", "sk-two")
    monkeypatch.setattr(imported_models.shutil, "which", lambda _: None)
    config, notes = read(DOCUMENTED, [])
    models = config["Models"]
    assert models["chat"]["command"].startswith("/opt/llama.cpp/llama-server")
    assert models["small"]["engine"] == "llamacpp"
    assert models["container"]["stop-command"] == "sh stop container"
    fixed = models["fixed"]
    assert (fixed["command"], fixed["url"], fixed["check"]) == (
        "sh serve --port 9503",
        "http://localhost:9503",
        "none",
    )
    assert config["Frontend"] == {"api-key": "sk-one", "further-api-key": ["sk-two"]}
    assert config["ModelSets"]["together"] == [
        ["chat", "container"],
        ["container", "small"],
        ["chat", "container", "fixed"],
        ["container", "fixed", "small"],
    ]
    graph = load_graph("dynaplan.components:Frontend", Path.cwd()).with_models(components_of(models))
    assert validate_config(graph, config) == []
    monkeypatch.undo()
    for name in ("container", "fixed"):
        COMMAND.check({key: each for key, each in models[name].items() if key in KEYS}, 0)
    left_out = {each.partition(": ")[0] for each in notes}
    assert {"peers", "selectors", "profiles", "tailcat"} <= left_out
    assert not {"apiKeys", "models.container.cmdStop", "matrix", "hooks"} & left_out


PRESETS = """
version = 1
[*]
n-gpu-layers = all
threads = 2
jinja = true
[embed]
model = /models/a.gguf
embeddings = true
pooling = last
[rerank]
model = /models/b.gguf
reranking = true
pooling = rank
[chat]
model = /models/c.gguf
temp = 0.6
top-p = 0.95
mlock = on
ctx-size = 0
model-draft = /models/d.gguf
"""


def test_without_a_llama_server_the_package_is_told_what_a_preset_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(imported_models.shutil, "which", lambda _: None)
    file = tmp_path / "models.ini"
    file.write_text(PRESETS)
    config, notes = read(file, [])
    assert config["Models"]["chat"] == {
        "engine": "llamacpp",
        "n-gpu-layers": "all",
        "threads": 2,
        "jinja": True,
        "temp": 0.6,
        "top-p": 0.95,
        "mlock": True,
        "ctx-size": 0,
        "model-draft": "/models/d.gguf",
        "model": "/models/c.gguf",
    }
    for entry in config["Models"].values():
        LLAMACPP.check_ahead(entry, 1)
    assert sum("the xllamacpp package serves it" in each for each in notes) == 3


def test_a_llama_server_that_is_named_by_its_path_is_replaced_by_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {cmd: '/opt/fork/llama-server -m a.gguf --port ${PORT} -fmoe'}}")
    entry = read(file, [])[0]["Models"]["a"]
    assert "engine" not in entry
    with pytest.raises(ConfigError, match="there is no program /opt/fork/llama-server"):
        LLAMACPP.check_ahead(entry, 1)


def test_an_engines_own_key_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {cmd: llama-server -m a.gguf --api-key x}}")
    _, notes = read(file, [])
    assert "a: --api-key is left out: clients are asked for `Frontend.api-key`." in notes


def test_a_comment_in_a_folded_command_ends_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("""
macros:
  base: >
    serve   # ${old}
    --port ${PORT}
models:
  a:
    cmd: >-
      ${base}  # leased
      --name 'a'  # the last
    description: >
      a # b
      c
""")
    config, _ = read(file, [])
    assert config["Models"]["a"]["command"] == "serve --port '${PORT}' --name a"
    assert config["Models"]["a"]["description"] == "a # b c"


def test_presets_and_directories_of_llama_cpp_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = tmp_path / "models.ini"
    presets.write_text("version = 1\n[tiny]\nmodel = /m/tiny.gguf\nload-on-startup = true\n")
    monkeypatch.setattr(imported_models.shutil, "which", lambda name: f"/bin/{name}")
    config, _ = read(presets, [])
    assert config["Models"]["tiny"] == {"command": "llama-server --model /m/tiny.gguf", "preload": True}
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "big.gguf").touch()
    assert is_models_file(str(folder))
    found = imported_file(folder)
    assert found and found.models["big"].options["model"] == str(folder / "big.gguf")


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["a.gguf", "convert.py"], True),
        (["sub/deep/a.gguf", "convert.py"], True),
        (["a.gguf", "config.json"], True),
        (["a.gguf", "config.json", "model.safetensors"], False),
        (["a.gguf", "__init__.py"], False),
        (["graph.py"], False),
    ],
)
def test_a_directory_with_gguf_files_is_one_of_models_whatever_lies_beside_them(
    tmp_path: Path, files: list[str], is_one: bool
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert is_models_file(str(tmp_path)) is is_one


def test_a_file_of_dynaplans_own_is_read_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("Models: {a: {engine: sim}}\n")
    assert read(file, []) == ({"Models": {"a": {"engine": "sim"}}}, [])
    assert is_models_file(str(file))
    assert not is_models_file(str(tmp_path))


def test_models_on_the_command_line_are_called_by_the_ends_of_their_paths(tmp_path: Path) -> None:
    made = parse_overrides(models_overrides([str(tmp_path / "a-1.5b.gguf"), "org/name"]))
    assert made["Models"] == {
        "a-1.5b": {"model": str(tmp_path / "a-1.5b.gguf"), "engine": "llamacpp"},
        "org/name": {"model": "org/name", "engine": "vllm"},
    }


def test_a_model_that_stands_twice_in_a_file_of_llama_swap_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models:\n  a: {cmd: one}\n  b: {cmd: two}\n  a: {cmd: three}\n")
    with pytest.raises(ConfigError, match="line 4: a is a second a"):
        imported_file(file)


def test_a_key_that_is_merged_from_an_anchor_and_given_anew_is_no_second_one(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models:\n  a: &a {cmd: one, ttl: 1}\n  b: {<<: *a, cmd: two}\n  c: {<<: *a, ttl: 2}\n")
    found = imported_file(file)
    assert found
    assert [each.options["command"] for each in found.models.values()] == ["one", "two", "one"]


def test_what_a_file_of_another_tool_is_taken_for_is_a_note_and_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {cmd: echo-server}}")
    _, notes = read(file, [])
    warn([*notes, "a thing to mend"])
    assert capsys.readouterr().err == (
        f"Note: {file} is a file of llama-swap: 1 model\nWarning: a thing to mend\n"
    )
