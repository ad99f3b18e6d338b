"""The JSON schema of a YAML knows what the options know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.config.schema import SECTIONS, config_schema

SHIPPED = sorted((Path(__file__).parents[3] / "graphs").glob("*.yaml"))
PYTHONS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def fits(value: Any, schema: Any) -> bool:
    """Tell whether a value fits, by the keywords that this schema uses."""
    if schema is True or schema is False:
        return bool(schema)
    kinds = schema.get("type", list(PYTHONS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(isinstance(value, PYTHONS[kind]) for kind in kinds) or value not in schema.get(
        "enum", [value]
    ):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, bool) or not isinstance(value, int | float | dict):
        return True
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(fits(each, known.get(key, rest)) for key, each in value.items())
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_fits(path: Path) -> None:
    assert fits(yaml.safe_load(path.read_text()), config_schema())


@pytest.mark.parametrize(
    "wrong",
    [
        {"Planner": {"adjustment-intervall": 10}},
        {"Planner": {"adjustment-interval": "ten"}},
        {"Planner": {"policy": "lod"}},
        {"VllmWorker": {"max-num-seqs": 0}},
        {"VllmWorker": {"ServiceArgs": {"workers": 0}}},
        {"VllmWorker": {"ServiceArgs": {"workers": "auto"}}},
        {"Frontend": {"ServiceArgs": {"workers": 0}}},
        {"Frontend": {"ServiceArgs": {"workers": "many"}}},
        {"Frontend": []},
    ],
)
def test_a_mistake_does_not_fit(wrong: Any) -> None:
    assert not fits(wrong, config_schema())


def test_keys_have_both_spellings_and_their_meaning() -> None:
    planner = config_schema()["properties"]["Planner"]["properties"]
    assert planner["adjustment-interval"] == planner["adjustment_interval"]
    assert "30" in planner["adjustment-interval"]["description"]


def test_a_frontend_may_be_counted_by_the_gpus() -> None:
    assert fits({"Frontend": {"ServiceArgs": {"workers": "auto"}}}, config_schema())


def test_a_service_of_ones_own_and_an_option_of_an_engine_are_free() -> None:
    own = {"Mine": {"anything": 1, "ServiceArgs": {"workers": 2}}, "VllmWorker": {"some-option": True}}
    assert fits(own, config_schema())
    assert set(SECTIONS) <= set(config_schema()["properties"])
