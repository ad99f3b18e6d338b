"""What a reload does to models that are loaded on request: to the ones that have changed, and to no other."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.cli.reload_models import ModelChanges, check_prefill_queue, model_changes
from dynaplan.config.model_entries import with_worker_sections
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.util.errors import ConfigError


def config(models: dict[str, Any], **others: Any) -> dict[str, dict[str, Any]]:
    return with_worker_sections({"Models": models, **others})


def test_a_model_is_added_changed_or_removed_and_the_others_are_not_named() -> None:
    before = config({"a": {"engine": "sim"}, "b": {"engine": "sim"}, "c": {"engine": "sim", "ttl": 5}})
    after = config({"a": {"engine": "sim"}, "c": {"engine": "sim", "ttl": 9}, "d": {"engine": "sim"}})
    assert model_changes(before, after) == ModelChanges(("d",), ("c",), ("b",))
    assert not model_changes(before, before)


def test_a_value_of_common_changes_the_models_that_take_it() -> None:
    models = {"a": {"engine": "sim"}, "b": {"engine": "sim", "max-model-len": 64}}
    before = config(models, Common={"max-model-len": 8})
    after = config(models, Common={"max-model-len": 16})
    assert model_changes(before, after).changed == ("a",)


def test_a_change_of_the_frontend_is_seen() -> None:
    before, after = (
        config({"a": {"engine": "sim"}}),
        config({"a": {"engine": "sim"}}, Frontend={"page": False}),
    )
    assert model_changes(before, after) == ModelChanges(others=True)
    assert model_changes(before, after).lines == ["other sections: changed; the frontends are replaced"]


def test_two_names_that_look_alike_may_not_change_places() -> None:
    with pytest.raises(ConfigError, match="look alike"):
        model_changes(config({"a/b": {}, "a b": {}}), config({"a b": {}, "a/b": {}}))


def test_a_planner_that_was_changed_touches_no_model() -> None:
    models = {"a": {"engine": "sim", "Planner": {"ttft": 300}}}
    before = config(models)
    assert model_changes(before, config({"a": {"engine": "sim", "Planner": {"ttft": 200}}})) == ModelChanges(
        planners=True
    )
    common = model_changes(before, config(models, Planner={"policy": "sla"}))
    assert common.lines == ["planners: changed; their process is replaced"]


def test_a_model_gets_loses_or_changes_its_prefill_workers_and_no_other_is_touched() -> None:
    whole = {"a": {"engine": "sim"}, "b": {"engine": "sim"}}
    pair = {**whole, "a": {"engine": "sim", "prefill": {}}}
    more = {**whole, "a": {"engine": "sim", "prefill": {"max-num-batched-tokens": 64}}}
    for before, after in ((whole, pair), (pair, more), (more, whole)):
        assert model_changes(config(before), config(after)) == ModelChanges(changed=("a",))


def test_prefill_workers_are_refused_where_no_server_was_started_for_their_queue() -> None:
    prefill = ServiceSpec("a-prefill", Role.PREFILL, model="a")
    graph = GraphSpec("graph:Entry", "/srv", "ns", (ServiceSpec("a", Role.DECODE, model="a"), prefill))
    check_prefill_queue(graph, {"NATS_SERVER": "nats://127.0.0.1:4222"})
    check_prefill_queue(GraphSpec("graph:Entry", "/srv", "ns", graph.services[:1]), {"NATS_SERVER": ""})
    with pytest.raises(ConfigError, match=r"Models\.a\.prefill: this deployment was started without a NATS"):
        check_prefill_queue(graph, {"NATS_SERVER": ""})
