"""The JSON schema of a deployment's YAML, for editors: made of the declared options alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.config import stock
from dynaplan.config.frontend import AUTO
from dynaplan.config.overrides import MODELS, PLANNER
from dynaplan.config.service_config import COMMON, COMMON_CONFIGS, SERVICE_ARGS
from dynaplan.config.settings.fields import Duration, Option, Options, Size, Texts, options_of
from dynaplan.config.settings.models import OnDemandSettings
from dynaplan.config.settings.worker import ModelSettings, Resources, ServiceArgs

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The version of JSON schema that editors' YAML servers know best."""

Schema = dict[str, Any]

SECTIONS: Mapping[str, tuple[str, Options, bool]] = {
    "Frontend": ("The OpenAI API, and how requests are routed", stock.FRONTEND, False),
    "Processor": ("Options of routing, as in the original", stock.PROCESSOR, False),
    "Router": ("Options of routing, as in the original", stock.ROUTER, False),
    "Planner": ("What scales the workers", stock.PLANNER, False),
    "VllmWorker": ("The decode workers, whatever their engine", stock.WORKER, True),
    "PrefillWorker": ("The prefill workers, whatever their engine", stock.WORKER, True),
}
"""Each section: its meaning, its options, and whether it may have others, which go to the engine."""

_TYPES: Mapping[type, str | Sequence[str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: ("array", "string"),
    dict: ("object", "string"),
    Duration: ("number", "string"),
    Texts: ("array", "string"),
    Size: ("integer", "string"),
}

_BOUNDS = {
    "minimum": "minimum",
    "above": "exclusiveMinimum",
    "maximum": "maximum",
    "below": "exclusiveMaximum",
}


def config_schema() -> Schema:
    """Return the schema. Keys may have ``-`` or ``_`` between words; a section of your own is free."""
    sections = {name: _section(*parts) for name, parts in SECTIONS.items()}
    frontends = sections["Frontend"]["properties"][SERVICE_ARGS]["properties"]["workers"]
    frontends |= {"type": ["integer", "string", "null"], "pattern": f"^{AUTO}$"}
    return {
        "$schema": DIALECT,
        "title": "A dynaplan deployment",
        "type": "object",
        "properties": {
            COMMON: {
                "description": "Values that sections take by common-configs",
                "type": ["object", "null"],
                "properties": _properties({**stock.WORKER, **options_of(ModelSettings)}),
            },
            **sections,
            MODELS: {
                "description": "Models that are loaded on request, by name",
                "type": ["object", "null"],
                "additionalProperties": _model(),
            },
        },
        "additionalProperties": {
            "description": "A service of your own",
            "type": ["object", "null"],
            "properties": _of_every_service(),
        },
    }


def _model() -> Schema:
    made = _section("One model", {**stock.WORKER, **options_of(OnDemandSettings)}, is_open=True)
    planner = _section("What scales the workers of this model", stock.PLANNER, is_open=False)
    return {**made, "properties": {**made["properties"], PLANNER: planner}}


def _section(about: str, options: Options, is_open: bool) -> Schema:
    properties = {**_of_every_service(), **_properties(options)}
    return {
        "description": about,
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": is_open,
    }


def _of_every_service() -> Schema:
    arguments = {**_properties(options_of(ServiceArgs))}
    arguments["resources"] = {
        "description": "What one worker gets",
        "type": ["object", "null"],
        "properties": _properties(options_of(Resources)),
    }
    names = {"description": f"Keys of {COMMON} to take", "type": "array", "items": {"type": "string"}}
    return {
        COMMON_CONFIGS: names,
        COMMON_CONFIGS.replace("-", "_"): names,
        SERVICE_ARGS: {"type": ["object", "null"], "properties": arguments},
    }


def _properties(options: Options) -> Schema:
    spelt = {}
    for name, each in options.items():
        spelt[name] = spelt[name.replace("-", "_")] = _property(each)
    return spelt


def _property(option: Option) -> Schema:
    """Return the schema of one option's value; null means "not set"."""
    made: Schema = {"description": option.help}
    kind = _TYPES.get(option.kind)
    if option.choices:
        spellings = (spelt for each in option.choices for spelt in (each, each.replace("-", "_")))
        made["enum"] = [*dict.fromkeys(spellings), None]
    elif kind:
        made["type"] = [*([kind] if isinstance(kind, str) else kind), "null"]
    for name, keyword in _BOUNDS.items():
        if (bound := getattr(option, name)) is not None:
            made[keyword] = bound
    return made
