from __future__ import annotations

import json

from dynaplan.gateway.model_documents import (
    LLAMA_CPP_STATUS,
    RunningModel,
    change_events,
    model_entry,
    running_document,
    status_document,
)
from dynaplan.models.model import ModelState


def test_every_state_has_a_word_of_llama_cpps() -> None:
    assert LLAMA_CPP_STATUS.keys() == set(ModelState)
    assert set(LLAMA_CPP_STATUS.values()) == {"unloaded", "loading", "loaded", "sleeping"}


def test_a_failed_model_says_why() -> None:
    assert status_document(ModelState.FAILED, "out of memory") == {
        "value": "unloaded",
        "failed": True,
        "reason": "out of memory",
    }


def test_a_model_is_listed_with_its_status_and_aliases() -> None:
    assert model_entry("a", {"value": "loading"}, ["c", "b"], 7, {"name": "A"}) == {
        "id": "a",
        "object": "model",
        "created": 7,
        "owned_by": "dynaplan",
        "aliases": ["b", "c"],
        "status": {"value": "loading"},
        "name": "A",
    }


def test_running_models_are_those_with_a_worker_in_llama_swaps_words() -> None:
    states = [
        RunningModel(state.value, state, "serve", "http://here", 60.0, "A", "a model") for state in ModelState
    ]
    running = running_document(states)["running"]
    assert {each["model"]: each["state"] for each in running} == {
        "loading": "starting",
        "ready": "ready",
        "draining": "stopping",
        "asleep": "stopped",
    }
    assert running[0] == {
        "model": "loading",
        "state": "starting",
        "cmd": "serve",
        "proxy": "http://here",
        "ttl": 60,
        "name": "A",
        "description": "a model",
    }


def test_a_change_of_a_model_is_an_event() -> None:
    unloaded = status_document(ModelState.UNLOADED)
    before = {"a": unloaded, "b": unloaded}
    after = {"a": status_document(ModelState.LOADING), "b": unloaded}
    events = [
        json.loads(each.removeprefix(b"data: "))
        for each in change_events(before, after).split(b"\n\n")
        if each
    ]
    assert events == [
        {"model": "a", "event": "status_change", "data": {"status": {"value": "loading"}}},
    ]
    assert change_events(after, after) == b""
