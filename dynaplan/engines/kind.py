"""What the rest of dynaplan knows of an engine: how it is checked and made, and how it differs from others.

Each engine is one module, whose ``KIND`` says all of it (``registry``). Frontends, ``doctor`` and the rules
of many models import that module too, so what only a running engine needs is imported when one is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from dynaplan.engines.api_rules import EngineApi
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.engines.requirements import Requirement


class EngineKind(ABC):
    """One engine. Its options are a worker's section, with keys in kebab-case."""

    name: str

    api = EngineApi()
    """The part of its API that frontends must know; the default bounds nothing."""

    model_kind = ""
    """What its ``model`` must be: ``GGUF_FILE`` or ``DIRECTORY`` (``model_files``); empty for a mere name."""

    requirement: Requirement | None = None
    """How to find or install it; None where nothing is needed."""

    takes_given_memory = False
    """It takes the GPU memory that it is given, all of it at its start, and not what its model needs."""

    needs_whole_context = False
    """It refuses to start without room for the KV entries of one request of full context."""

    divides_by_layers = False
    """It divides a model by whole layers over all GPUs that it sees, so it has no tensor parallel size."""

    counts_kv_in_tokens = False
    """It states the size of its KV cache in tokens, not in blocks."""

    moves_kv_between_hosts = False
    """A prompt's KV entries can be taken over from another host, so ``kv-network`` is for it."""

    is_dynamo_backend = False
    """Dynamo's operator and NVIDIA's AI Configurator know it, by this name."""

    @property
    def can_sleep(self) -> bool:
        """Whether it can free most of its GPU memory and take it again without a start."""
        return False

    @abstractmethod
    def check(self, options: Mapping[str, Any], gpus: float) -> None:
        """Raise the ConfigError that starting with these options would, as far as it can be foreseen.

        ``gpus`` is the ``resources.gpu`` of one worker.
        """

    def check_ahead(self, options: Mapping[str, Any], gpus: float) -> None:
        """Check what ``check`` does, and what needs a library that no worker shall load for it."""
        self.check(options, gpus)

    @abstractmethod
    def make(self, options: Mapping[str, Any], context: EngineContext) -> Engine:
        """Return an engine, not started; raises ConfigError for a wrong option."""
