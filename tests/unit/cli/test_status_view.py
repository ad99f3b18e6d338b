"""From a document to what is shown of it, beyond the pages of ``golden.py``."""

from __future__ import annotations

from dynaplan.cli.status_view import view_of
from tests.unit.cli.status_documents import document, gpu_document


def test_what_was_decided_last_is_told_whoever_decided_it() -> None:
    planner = {"decided_unix_s": 100.0, "last_decision": "16:37:24  no change"}
    event = {"at_unix_s": 200.0, "model": "ant", "sentence": "load: asked for"}
    change = {"at_unix_s": 300.0, "by": "alice", "what": "decode 4 -> 2"}
    for shown, more in (
        ("", {}),
        ("16:37:24  no change", planner),
        ("model ant: load: asked for", {**planner, "model_events": [event]}),
        ("by hand (alice): decode 4 -> 2", {**planner, "model_events": [event], "by_hand": [change]}),
    ):
        assert view_of(document(**more), 0.0).decision.endswith(shown)


def test_gpus_that_were_not_read_are_not_shown() -> None:
    plain = {key: gpu_document(0)[key] for key in ("index", "name", "memory_bytes", "workers")}
    assert view_of(document(gpus=[plain]), 0.0).gpus == ()
