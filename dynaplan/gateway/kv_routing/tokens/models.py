"""The tokenizers of the models that workers serve: one tokenising process for each."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Any

from dynaplan.gateway.kv_routing.prompt_tokens import Tokenizer
from dynaplan.gateway.kv_routing.tokens.files import model_directory
from dynaplan.gateway.kv_routing.tokens.process import TokenizingProcess

log = logging.getLogger(__name__)

PACKAGES = ("tokenizers", "jinja2")
"""The packages that tokenising needs: those of the extra ``kv``."""

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines that load the tokenizer of a Hugging Face directory."""


class ModelTokenizers:
    """Finds the tokenizer of a worker's model by its card, and says where there is none and why."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._processes: dict[tuple[str, str], TokenizingProcess | None] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def of(self, card: Mapping[str, Any]) -> Tokenizer | None:
        """Return the tokenizer of the worker with that card, started; None where there is none."""
        key = _key(card)
        if key not in self._processes:
            self._processes[key] = self._found(card, key)
        return self._processes[key]

    def fault(self, card: Mapping[str, Any]) -> str:
        """Return the reason why there are no tokens for the worker with that card; empty when there are."""
        self.of(card)
        key = _key(card)
        process = self._processes[key]
        return process.fault if process else self._reasons[key]

    async def close(self) -> None:
        """End the processes that turn prompts into token ids."""
        await asyncio.gather(*(each.close() for each in self._processes.values() if each))

    def _found(self, card: Mapping[str, Any], key: tuple[str, str]) -> TokenizingProcess | None:
        model, template = key
        reason = ""
        if card.get("engine") not in ENGINES:
            reason = f"engine {card.get('engine')} has a tokenizer of its own"
        elif missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            reason = f"{missing[0]} is not installed; pip install {' '.join(PACKAGES)}"
        elif (directory := model_directory(model, self._environment)) is None:
            reason = f"there is no tokenizer.json of {model} on this host"
        else:
            process = TokenizingProcess(directory, template)
            process.start()
            return process
        log.info("no tokens of %s: %s; routing by prediction", model, reason)
        self._reasons[key] = reason
        return None


def _key(card: Mapping[str, Any]) -> tuple[str, str]:
    return str(card.get("tokenizer") or ""), str(card.get("chat_template") or "")
