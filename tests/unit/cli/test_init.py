"""``dynaplan init`` as a user types it: what it finds, what it writes, and why it does not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dynaplan.cli import doctor
from dynaplan.cli.init import command
from dynaplan.cli.model_needs import ModelNeeds
from dynaplan.models.model import NO_CONSTRAINTS, Device
from dynaplan.models.rules.memory import HOST, Need
from dynaplan.util.errors import ConfigError
from tests.unit.engines.test_gguf import number
from tests.unit.engines.test_local_models import ollama
from tests.unit.engines.test_model_facts import gguf, string

GIB = 2**30


def model(directory: Path, name: str, trained_tokens: int = 131072) -> Path:
    """A file whose header says a shape and a context."""
    keys = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    numbers = [number(f"qwen2.{key}", each) for key, each in keys.items()]
    directory.mkdir(parents=True, exist_ok=True)
    named, context = string("general.architecture", "qwen2"), number("qwen2.context_length", trained_tokens)
    return gguf(directory, named, *numbers, context, name=name)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("dynaplan.engines.local_models.OLLAMA_SERVICE_DIRECTORY", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def box(monkeypatch: pytest.MonkeyPatch, *devices: Device, weights_bytes: int = 0) -> None:
    """Let a box have these devices, each token take 0.1 MB, and a model that is called broken be refused."""

    def needs(file: str, *_: Any) -> ModelNeeds:
        entries = yaml.safe_load(Path(file).read_text())["Models"]
        if broken := [name for name in entries if "broken" in name]:
            raise ConfigError(f"Models.{broken[0]}.model: it is cut", hint="Fetch it again.")
        return ModelNeeds([need(name, **each) for name, each in entries.items()], devices, NO_CONSTRAINTS)

    def need(name: str, parallel: int, **options: Any) -> Need:
        size = weights_bytes + parallel * options["max-model-len"] * 100_000
        if devices[0].index == HOST:
            return Need(name, size, 0)
        is_large = size > devices[0].total_bytes
        return Need(name, size // 2 if is_large else size, 2 if is_large else 1)

    monkeypatch.setattr(doctor, "read_model_needs", needs)


ONE_CARD = (Device(0, 24 * GIB),)
TWO_CARDS = (Device(0, 24 * GIB), Device(1, 24 * GIB))


def init(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def written(path: str = "models.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load(Path(path).read_text())["Models"])


def refusal(*arguments: str) -> ConfigError:
    result = init(*arguments)
    assert isinstance(result.exception, ConfigError)
    return result.exception


def test_the_file_of_a_model_that_is_here_is_one_that_serve_takes(home: Path) -> None:
    ant = model(home / ".lmstudio/models/owner/ant", "ant.gguf", 8192)
    assert init().exit_code == 0
    assert written() == {"ant": {"model": "owner/ant:ant", "max-model-len": 8192, "parallel": 4}}
    found = doctor.read_model_needs("models.yaml", (), None, 0)
    assert [each.model for each in found.needs] == ["ant"]
    text = Path("models.yaml").read_text()
    assert f"LM Studio: {ant}" in text
    assert "8192 tokens each: what it was trained for" in text


@pytest.mark.parametrize(
    ("devices", "weights_bytes", "requests", "tokens", "says"),
    [
        (ONE_CARD, 5 * GIB, 4, 32768, "enough for most; it was trained for 131072"),
        (ONE_CARD, 16 * GIB, 4, 16384, "what fits; it was trained for 131072"),
        (ONE_CARD, 22 * GIB, 2, 8192, "what fits"),
        (TWO_CARDS, 30 * GIB, 4, 32768, "on GPU 0 and 1"),
        ((Device(HOST, 24 * GIB),), 5 * GIB, 4, 32768, "the CPU"),
    ],
)
def test_a_model_gets_the_most_that_fits_on_one_card_else_on_several_with_the_reason(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: Sequence[Device],
    weights_bytes: int,
    requests: int,
    tokens: int,
    says: str,
) -> None:
    box(monkeypatch, *devices, weights_bytes=weights_bytes)
    model(home, "ant.gguf")
    init("ant.gguf")
    ant = written()["ant"]
    assert (ant["parallel"], ant["max-model-len"]) == (requests, tokens)
    assert says in Path("models.yaml").read_text()


def test_one_that_does_not_fit_or_is_broken_is_a_comment_with_the_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box(monkeypatch, *ONE_CARD)
    model(home, "ant.gguf")
    model(home, "broken.gguf")
    init("ant.gguf", "broken.gguf")
    assert set(written()) == {"ant"}
    assert '# Not served here: Models.broken.model: it is cut. Fetch it again.\n  # "broken":' in (
        Path("models.yaml").read_text()
    )


def test_where_nothing_can_be_served_no_file_is_written_and_each_reason_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box(monkeypatch, *ONE_CARD, weights_bytes=90 * GIB)
    model(home, "ant.gguf")
    assert "ant.gguf: it asks for 2 GPUs, and there are 1" in refusal("ant.gguf").hint
    assert not Path("models.yaml").exists()


def test_a_model_of_two_tools_is_there_once_and_two_of_one_name_have_a_number(home: Path) -> None:
    for owner in ("one", "other"):
        model(home / f".lmstudio/models/{owner}/ant", "ant.gguf")
    blob = ollama(home, "ant", "latest")
    shutil.copy(model(home, "ant.gguf"), blob)
    link = home / ".cache/llama.cpp/owner_ant_ant.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    init()
    assert set(written()) == {"ant:latest", "ant", "ant-2"}


def test_a_number_behind_a_key_is_one_that_no_other_model_has(home: Path) -> None:
    for name in ("x/ant.gguf", "y/ant.gguf", "z/ant-2.gguf"):
        model(home / Path(name).parent, Path(name).name)
    init("x/ant.gguf", "y/ant.gguf", "z/ant-2.gguf")
    assert set(written()) == {"ant", "ant-3", "ant-2"}


def test_a_directory_that_is_not_there_is_a_sentence(home: Path) -> None:
    model(home, "ant.gguf")
    assert "--output none/m.yaml: No such file" in str(refusal("ant.gguf", "-o", "none/m.yaml"))


def test_a_directory_that_vllm_loads_is_told_with_what_is_missing_for_it(home: Path) -> None:
    model(home, "ant.gguf")
    snapshot = home / ".cache/huggingface/hub/models--owner--bee/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    init("ant.gguf", "owner/bee")
    assert set(written()) == {"ant"}
    assert "pip install 'vllm'" in Path("models.yaml").read_text()


def test_a_file_of_llama_swap_is_named_as_one_that_serve_takes(home: Path) -> None:
    model(home, "ant.gguf")
    (home / "config.yaml").write_text("models:\n  bee:\n    cmd: llama-server -m bee.gguf --port ${PORT}\n")
    assert (
        "llama-swap's config.yaml has 1 model: `dynaplan serve config.yaml`"
        in init("ant.gguf", "--stdout").output
    )
    assert not Path("models.yaml").exists()


def test_nothing_is_overwritten(home: Path) -> None:
    Path("models.yaml").write_text("mine")
    assert "is not overwritten" in str(refusal())
    assert Path("models.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"), [((), "there is no model on this box"), (("nosuch",), "nosuch is no model")]
)
def test_without_a_model_the_next_step_is_told(arguments: Sequence[str], says: str) -> None:
    error = refusal(*arguments)
    assert says in str(error)
    assert "dynaplan pull" in error.hint
