"""NVIDIA's library as the estimator of step times, where it is installed; a stand-in has its call."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.lab.profiling.estimating import find_aiconfigurator
from dynaplan.util.errors import ConfigError


class StandIn:
    """Copies ``cli_estimate`` of aiconfigurator 0.12.0: times in ms; it raises what it lacks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def cli_estimate(self, model_path: str, system_name: str, **sizes: Any) -> Any:
        self.asked.append((model_path, system_name, sizes))
        if system_name == "a10":
            raise KeyError("no such system")
        return SimpleNamespace(ttft=sizes["isl"] / 10, tpot=5.0 + sizes["batch_size"])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    modules = {
        "aiconfigurator.cli.api": made,
        "importlib.metadata": SimpleNamespace(version=lambda name: "0.12.0"),
    }
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    return made


def test_a_prompt_is_one_static_context_and_decoding_a_static_generation(library: StandIn) -> None:
    times = find_aiconfigurator("/models/llama", "h100_sxm", "vllm")
    assert times.prefill_ms(3000, 2) == 300.0
    assert times.decode_ms(1000, 500, 16, 4) == 21.0
    shared = {"backend_name": "vllm"}
    assert library.asked == [
        (
            "/models/llama",
            "h100_sxm",
            {"mode": "static_ctx", "isl": 3000, "osl": 1, "batch_size": 1, "tp_size": 2, **shared},
        ),
        (
            "/models/llama",
            "h100_sxm",
            {"mode": "static_gen", "isl": 1000, "osl": 500, "batch_size": 16, "tp_size": 4, **shared},
        ),
    ]


def test_what_it_has_no_tables_of_is_an_error_of_the_user(library: StandIn) -> None:
    with pytest.raises(ConfigError, match="no such system") as raised:
        find_aiconfigurator("/models/llama", "a10", "vllm").prefill_ms(100, 1)
    assert "--estimate" in raised.value.hint
    with pytest.raises(ConfigError, match="llamacpp"):
        find_aiconfigurator("/models/llama", "h100_sxm", "llamacpp")


def test_without_it_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="not installed") as raised:
        find_aiconfigurator("/models/llama", "h100_sxm", "vllm")
    assert "pip install aiconfigurator" in raised.value.hint
