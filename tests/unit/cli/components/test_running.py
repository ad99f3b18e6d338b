"""A component's configuration, and what it is checked against."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynaplan.cli.components.joining import Joined
from dynaplan.cli.components.running import Component, checked, config_for, refuse_another_model
from dynaplan.store.instances import Instance
from dynaplan.util.errors import ConfigError

WORKER = "VllmWorker"


def component(section: dict[str, object], config: dict[str, dict[str, object]] | None = None) -> Component:
    return checked(WORKER, config or {}, section, "box")


def test_flags_come_over_the_file_and_the_file_over_what_the_deployment_has(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("VllmWorker: {model: of-the-file, seed: 2}\nPlanner: {no-operation: true}\n")
    deployed = {WORKER: {"model": "deployed", "max_num_seqs": 3, "ServiceArgs": {"workers": 4}}}
    config = config_for(str(file), ["--VllmWorker.seed=5"], Joined("box", config=deployed))
    made = component({"model": "of-a-flag"}, config)
    assert made.config[WORKER] == {
        "model": "of-a-flag",
        "seed": 5,
        "max_num_seqs": 3,
        "ServiceArgs": {},
    }
    assert (made.spec.services[0].workers, made.spec.services[0].gpus) == (1, 1)
    assert made.worker_name.endswith(f"_{os.getpid()}")


def test_an_option_is_checked_as_its_own_process_would() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        component({"max-num-seqs": "many"})
    assert component({"ServiceArgs": {"resources": {"gpu": "0.5"}}}).spec.services[0].gpus == 0.5


def test_a_worker_with_another_model_than_those_of_its_namespace_is_refused() -> None:
    there = Instance("box", WORKER, "generate", 7, "", worker="box_VllmWorker", card={"model": "llama"})
    joined = Joined("box", instances=(there,))
    refuse_another_model(component({"model": "llama"}), joined)
    refuse_another_model(component({"model": "x", "served-model-name": "llama"}), joined)
    refuse_another_model(component({"model": "other"}), Joined("box"))
    for section in ({"model": "other"}, {}):
        with pytest.raises(ConfigError, match=r"box_VllmWorker of namespace box serves llama"):
            refuse_another_model(component(section), joined)
