"""The merged configuration as a service reads it, in whatever process it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dynaplan.config.settings.fields import kebab
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.config.settings.fields import Options


CONFIG_VARIABLE = "DYNAMO_SERVICE_CONFIG"
COMMON = "Common"
COMMON_CONFIGS = "common-configs"
SERVICE_ARGS = "ServiceArgs"

NEGATED_WHEN_FALSE = frozenset({"enable-prefix-caching", "use-tqdm-on-load", "multi-step-stream-outputs"})
"""Options that are on by default in vLLM: False is written as ``--no-...``."""


class MissingOption(ConfigError, ValueError):
    """An option that a service cannot do without is not set."""


class ServiceConfig(dict[str, dict[str, Any]]):
    """Service -> its options, as merged by ``serve`` and handed down in ``DYNAMO_SERVICE_CONFIG``."""

    _instance: ClassVar[ServiceConfig | None] = None

    @classmethod
    def get_instance(cls) -> ServiceConfig:
        """The configuration of this process, read from the environment once; empty when there is none.

        Raises ConfigError.
        """
        if cls._instance is None:
            cls._instance = cls.from_text(os.environ.get(CONFIG_VARIABLE, ""))
        return cls._instance

    @classmethod
    def reset(cls) -> None:
        """Forget what was read: the next ``get_instance`` reads the environment again."""
        cls._instance = None

    @classmethod
    def from_text(cls, text: str) -> ServiceConfig:
        """Read JSON; raises ConfigError when it is not a mapping of mappings."""
        try:
            sections = json.loads(text or "{}")
        except ValueError as error:
            raise ConfigError(
                f"Failed to parse {CONFIG_VARIABLE}: {error}", hint="It is set by serve."
            ) from error
        if not isinstance(sections, dict) or not all(isinstance(each, dict) for each in sections.values()):
            raise ConfigError(f"{CONFIG_VARIABLE} is not a mapping of services", hint="It is set by serve.")
        return cls(sections)

    def require(self, service_name: str, key: str) -> Any:
        """The value of an option; raises MissingOption when it is not set."""
        section = self.get_parsed_config(service_name)
        if key not in section:
            raise MissingOption(f"{service_name}.{key} must be specified in configuration")
        return section[key]

    def get_parsed_config(self, service_name: str) -> dict[str, Any]:
        """The options of a service, those it takes from ``Common`` first; keys as they were written."""
        return _parsed(self, service_name)

    def as_args(self, service_name: str, prefix: str = "") -> list[str]:
        """The service's options that begin with the prefix, as command-line tokens without it."""
        arguments: list[str] = []
        for key, value in self.get_parsed_config(service_name).items():
            if key.startswith(prefix):
                arguments += _tokens(key.removeprefix(prefix), value)
        return arguments


def section_options(config: Mapping[str, Mapping[str, Any]], service_name: str) -> dict[str, Any]:
    """The options of a service with what it takes from ``Common``, keys in kebab-case."""
    return kebab_keys(_parsed(config, service_name))


def served_model_name(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the model name that ``Frontend``, or else ``Common``, sets for all workers; empty for none."""
    sections = (section_options(config, name) for name in ("Frontend", COMMON))
    return next((str(each["served-model-name"]) for each in sections if each.get("served-model-name")), "")


def common_values(config: Mapping[str, Mapping[str, Any]], section: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a section's ``common-configs`` takes from ``Common``; its own keys are left out."""
    own = {kebab(key) for key in section}
    common = {kebab(key): (key, value) for key, value in config.get(COMMON, {}).items()}
    wanted = (kebab(key) for key in names_of_common(section) if kebab(key) not in own)
    return dict(common[key] for key in wanted if key in common)


def names_of_common(section: Mapping[str, Any]) -> list[str]:
    """Return the keys of ``Common`` that the section lists in its ``common-configs``."""
    return section.get(COMMON_CONFIGS) or section.get("common_configs") or []


def kebab_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with every key in kebab-case, however it was written."""
    return {kebab(key): value for key, value in settings.items()}


def _parsed(config: Mapping[str, Mapping[str, Any]], service_name: str) -> dict[str, Any]:
    section = config.get(service_name) or {}
    own = {key: value for key, value in section.items() if kebab(key) not in (SERVICE_ARGS, COMMON_CONFIGS)}
    return common_values(config, section) | own


def _tokens(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [f"--{key}"]
    if value is False:
        return [f"--no-{kebab(key)}"] if kebab(key) in NEGATED_WHEN_FALSE else []
    return [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]


def known_options(table: str) -> Options:
    """The table of that name in ``config/stock.py``."""
    from dynaplan.config import stock

    options: Options = getattr(stock, table)
    return options
