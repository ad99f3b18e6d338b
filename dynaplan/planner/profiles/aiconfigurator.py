"""Step times by NVIDIA's AI Configurator: measured operators of a GPU, an engine and its version, added up.

The library is the user's to install (Apache-2.0; with its tables 850 MB). Source of the call: its
``cli_estimate`` (0.12.0), whose static modes compute one batch without scheduling.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from dynaplan.util.errors import ConfigError

BACKENDS = ("vllm", "sglang", "trtllm")
"""Engines that it has tables of."""


@dataclass(frozen=True)
class AiConfigurator:
    """The times of a model on a kind of GPU, under an engine.

    ``model`` is a directory with its config.json, or a name of Hugging Face's. Each time takes seconds to
    compute. Methods raise ConfigError for what it has no tables of.
    """

    model: str
    gpu_type: str
    backend: str
    version: str
    api: Any

    def prefill_ms(self, isl_tokens: int, tensor_parallel_size: int) -> float:
        """Return the TTFT of one prompt alone, in ms."""
        size = tensor_parallel_size
        return float(self._estimate("static_ctx", isl=isl_tokens, osl=1, batch_size=1, tp_size=size).ttft)

    def decode_ms(self, isl_tokens: int, osl_tokens: int, requests: int, tensor_parallel_size: int) -> float:
        """Return the mean ITL of that many requests that decode together, in ms."""
        lengths = {"isl": isl_tokens, "osl": osl_tokens}
        size = tensor_parallel_size
        return float(self._estimate("static_gen", **lengths, batch_size=requests, tp_size=size).tpot)

    def _estimate(self, mode: str, **sizes: int) -> Any:
        try:
            return self.api.cli_estimate(
                self.model, self.gpu_type, mode=mode, backend_name=self.backend, **sizes
            )
        except Exception as error:
            # Whatever its tables lack: it raises errors of many kinds, of its own and built-in ones.
            raise ConfigError(
                f"aiconfigurator {self.version} cannot estimate {self.model} on {self.gpu_type} with"
                f" {self.backend}: {error}",
                hint="Without --estimate the engine is measured.",
            ) from error


def find_aiconfigurator(model: str, gpu_type: str, engine: str) -> AiConfigurator:
    """Return its times; raises ConfigError when it is not installed, or not for that engine."""
    if engine not in BACKENDS:
        raise ConfigError(
            f"aiconfigurator knows no engine '{engine}'", hint=f"Expected one of {', '.join(BACKENDS)}."
        )
    try:
        api = importlib.import_module("aiconfigurator.cli.api")
        version = importlib.import_module("importlib.metadata").version("aiconfigurator")
    except ImportError as error:
        raise ConfigError(
            f"--estimate needs aiconfigurator, which is not installed ({error})",
            hint="Run: pip install aiconfigurator; or measure the engine, without --estimate.",
        ) from error
    return AiConfigurator(model, gpu_type, engine, version, api)
