"""Secrets of a configuration, taken out of it: a ConfigMap can be read by more people than a Secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.masking import mask_secrets
from dynaplan.domain.settings.fields import kebab
from dynaplan.options.overrides import Sections
from dynaplan.options.service_config import SERVICE_ARGS

VARIABLES: Mapping[str, str] = {"hf-token": "HF_TOKEN", "api-key": "DYNAPLAN_API_KEY"}
"""Secret options -> the variable that says the same."""


@dataclass
class PublicConfig:
    """A configuration without its secrets, and those: section -> variable -> value."""

    sections: Sections = field(default_factory=dict)
    variables: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    def of(self, name: str, common: str = "Common") -> dict[str, str]:
        """Return the secret variables of a service, those of the common section among them."""
        return {**self.variables.get(common, {}), **self.variables.get(name, {})}


def without_secrets(config: Mapping[str, Mapping[str, Any]]) -> PublicConfig:
    """Take the secrets out: ``hf-token``, ``api-key``, and everything in ``ServiceArgs.envs``.

    Raises ConfigError for any other option that holds one, naming it.
    """
    public = PublicConfig()
    for name, section in config.items():
        public.variables[name] = _variables(section)
        public.sections[name] = _without(section)
        if hidden := _hidden(public.sections[name]):
            raise ConfigError(
                f"{name}.{hidden} holds a secret, and a ConfigMap is no place for it",
                hint=f"Give it as a variable in {name}.{SERVICE_ARGS}.envs, which goes into the Secret.",
            )
    return public


def _variables(section: Mapping[str, Any]) -> dict[str, str]:
    named = {
        VARIABLES[kebab(key)]: str(value)
        for key, value in section.items()
        if kebab(key) in VARIABLES and value
    }
    envs = (section.get(SERVICE_ARGS) or {}).get("envs") or {}
    return {**named, **{variable: str(value) for variable, value in envs.items()}}


def _without(section: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in section.items() if kebab(key) not in VARIABLES}
    if isinstance(arguments := kept.get(SERVICE_ARGS), Mapping):
        kept[SERVICE_ARGS] = {key: value for key, value in arguments.items() if key != "envs"}
    return kept


def _hidden(section: Mapping[str, Any]) -> str:
    """Return the first key whose value holds a secret; empty for none."""
    return next((key for key, value in section.items() if mask_secrets({key: value}) != {key: value}), "")
