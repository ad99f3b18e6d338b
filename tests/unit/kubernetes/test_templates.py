"""How templates are filled in: values in their places, parts that are left out, and nothing read twice."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.kubernetes.templates import DIRECTORY, fill

VALUES: dict[str, Any] = {
    "name": "box",
    "number": 3,
    "none": None,
    "empty": [],
    "list": ["a", "b"],
    "no": False,
}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ({"name": "${name}-frontend"}, {"name": "box-frontend"}),
        ({"replicas": "${number}"}, {"replicas": 3}),
        ({"args": ["x", "${list}", "${empty}", "${none}", "y${number}"]}, {"args": ["x", "a", "b", "y3"]}),
        ({"args": "${list}", "flag": "${no}"}, {"args": ["a", "b"], "flag": False}),
        ({"kept": 1, "limits": {"gpu": "${none}"}}, {"kept": 1}),
        ({"emptyDir": {}}, {"emptyDir": {}}),
        ([{"$if": "${no}", "name": "A"}, {"$if": "${name}", "name": "B"}], [{"name": "B"}]),
        ("$HOME $(NAME) $name", "$HOME $(NAME) $name"),
    ],
)
def test_values_are_put_in_their_places(template: Any, filled: Any) -> None:
    assert fill(template, VALUES) == filled


def test_whatever_a_value_contains_stays_the_text_of_one_field() -> None:
    hostile = "x\nkind: Secret # ${name} {{ }}"
    assert fill({"a": "${text}", "b": "of ${text}"}, {"text": hostile}) == {
        "a": hostile,
        "b": f"of {hostile}",
    }


def test_a_place_without_a_value_is_a_fault_of_ours() -> None:
    with pytest.raises(KeyError, match="nothing"):
        fill({"name": "${nothing}"}, VALUES)


def test_every_manifest_says_at_its_beginning_of_which_kind_it_is() -> None:
    import yaml

    for path in DIRECTORY.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert {"apiVersion", "kind", "metadata"} <= document.keys(), path
