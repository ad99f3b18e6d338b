"""Which models can never be loaded, as it is said at the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dynaplan.cli.model_needs import ModelNeeds, absent_file, check_never_loaded
from dynaplan.models.model import NO_CONSTRAINTS, Device
from dynaplan.models.rules.memory import Need
from dynaplan.util.errors import ConfigError

GIB = 2**30
BOX = (Device(0, 24 * GIB, foreign_bytes=23 * GIB), Device(1, 24 * GIB))


def check(*needs: Need, devices: Sequence[Device] = BOX) -> list[str]:
    return check_never_loaded(ModelNeeds(needs, devices, NO_CONSTRAINTS))


def test_what_only_other_programs_hold_is_not_said_at_the_start() -> None:
    assert check(Need("ant", 20 * GIB, allowed=frozenset({0}))) == []


def test_a_model_that_can_never_be_loaded_is_a_warning_beside_others() -> None:
    (said,) = check(Need("ant", 30 * GIB), Need("bee", GIB))
    assert said.startswith("model ant: it needs 30.0 GiB, and the largest GPU has 24.0 GiB: never loaded")


def test_a_deployment_that_can_load_none_of_its_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model ant: it needs 30\.0 GiB, .*never loaded"):
        check(Need("ant", 30 * GIB), Need("bee", 40 * GIB))


def test_more_gpus_than_there_are_by_the_owners_words_name_the_words() -> None:
    with pytest.raises(ConfigError, match=r"asks for 4 GPUs \(--tensor-parallel-size 4\), and there are 2"):
        check(Need("ant", GIB, 4, chosen_by="--tensor-parallel-size 4"))


def test_a_file_that_a_command_names_is_looked_for_as_the_program_will_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absent_file({"command": "nice llama-server -m ~/a.gguf"}) == "~/a.gguf"
    assert absent_file({"command": f"llama-server -m {tmp_path}/a.gguf"}) == ""
    assert absent_file({"command": "llama-server -hf organization/model:Q4_K_M"}) == ""
    assert absent_file({"command": "docker run -p 1:1 image -m /models/a.gguf"}) == ""
    assert absent_file({"model": "a.gguf"}) == ""
