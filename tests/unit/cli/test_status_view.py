"""From a document to what is shown of it."""

from __future__ import annotations

import click

from dynaplan.cli.status_view import render_page, view_of
from tests.unit.cli.status_documents import (
    FIGURES,
    document,
    gpu_document,
    model_document,
    worker_document,
)


def test_the_head_says_what_is_served_how_and_where() -> None:
    gpus = [gpu_document(index) for index in range(3)]
    view = view_of(document(gpus=gpus), 0.0)
    ready = "ready decode 1 of 2 (being carried out)"
    assert view.title == "dynamo  http://127.0.0.1:8000  serve runs as pid 5"
    supervised = view_of(document(supervisor_pid=4, version="0.2.0"), 0.0)
    assert supervised.title.endswith("serve runs as pid 5, its supervisor as 4, version 0.2.0")
    assert view.service == f"model llama  policy load  {ready}  2 of 3 GPUs free"
    assert view.places == "metrics http://127.0.0.1:8000/metrics  logs ~/logs"


def test_models_that_are_loaded_on_request_have_a_table_and_say_why_they_are_not_there() -> None:
    failed = model_document(component="bee", state="failed", why="its file is broken")
    rows = worker_document(), worker_document("dynamo_bee", component="bee", state="failed", reason="broken")
    view = view_of(document(*rows, on_request={"ant": model_document(), "bee": failed}, policy=None), 0.0)
    assert view.service.startswith("models ready 1 of 2  no planner")
    assert [row[0] for row in view.models] == ["MODEL", "ant", "bee"]
    assert view.notes == ("bee: its file is broken",)
    assert "LEAVES" in render_page(view)
    assert "MODEL" not in render_page(view_of(document(), 0.0))


def test_a_worker_whose_process_is_gone_is_not_counted_as_ready() -> None:
    rows = worker_document(), worker_document("dynamo_VllmWorker_1", is_alive=False)
    assert "ready decode 1 of 2" in view_of(document(*rows), 0.0).service
    assert "dead" in view_of(document(*rows), 0.0).workers[2]


def test_without_serve_nothing_is_said_of_planner_and_places() -> None:
    of_store = document(serve_pid=None, models=[])
    for key in ("policy", "desired", "metrics_url", "gpus", "free_gpus"):
        del of_store[key]
    view = view_of(of_store, 0.0)
    assert (view.service, view.places) == ("model not known yet", "")
    assert view.title.endswith("no serve of it runs here")
    assert view_of(document(policy=None), 0.0).service.startswith("model llama  no planner")


def test_a_look_at_one_moment_names_the_targets_too() -> None:
    targets = {"ttft_ms": 500.0, "itl_ms": 50.0, "ttft_percentile": 90.0, "itl_percentile": 95.0}
    assert "policy load  targets TTFT 500 ms, ITL 50 ms" in view_of(document(targets=targets), 0.0).service


def test_clients_that_do_not_stream_have_a_rate_and_the_reason_why_there_is_no_ttft() -> None:
    unstreamed = {**FIGURES, "ttft_mean_ms": None, "itl_mean_ms": None}
    assert view_of(document(load=unstreamed), 0.0).load == (
        "7.2 requests/s  432 tokens/s  TTFT - (no answer was streamed)  ITL -",
    )
    idle = {**unstreamed, "requests_per_s": 0.0, "tokens_per_s": 0.0}
    assert view_of(document(load=idle), 0.0).load == ("0.0 requests/s  0 tokens/s  TTFT -  ITL -",)


def test_each_model_has_its_rates_and_those_who_wait_are_told_for_what() -> None:
    busy = model_document(waiting=3, oldest_unix_s=90.0, in_flight=4, load=FIGURES)
    view = view_of(document(on_request={"ant": busy, "bee": model_document(load=None)}), 100.0)
    assert [row[-2:] for row in view.models] == [("REQ/S", "TOK/S"), ("7.2", "432"), ("-", "-")]
    assert view.notes == ("ant: 3 wait until one of the 4 that it answers has ended",)
    assert [row[-1] for row in view_of(document(on_request={"ant": model_document()}), 0.0).models] == [
        "LEAVES",
        "-",
    ]


def test_the_memory_that_models_share_says_who_has_how_much_of_it() -> None:
    gpu = {"index": 1, "total_bytes": 24 * 10**9, "foreign_bytes": 5 * 10**9, "by_model": {"ant": 12 * 10**9}}
    host = {"index": -1, "total_bytes": 7 * 10**8, "foreign_bytes": 0, "by_model": {}}
    view = view_of(document(model_memory=[gpu, host]), 0.0)
    assert view.memory == (
        "ant 12.0, other programs 5.0, free 7.0 of 24.0 GB of GPU 1 for models",
        "free 0.7 of 0.7 GB of the machine's memory for models",
    )
    assert "\n".join(view.memory) in render_page(view)


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


def test_a_planner_that_only_observes_is_no_missing_one() -> None:
    service = view_of(document(observes_only=True), 0.0).service
    assert service.startswith("model llama  policy load, which only observes  ready")


def test_the_load_is_shown_against_its_targets() -> None:
    targets = {"ttft_ms": 500.0, "itl_ms": 50.0, "ttft_percentile": 90.0, "itl_percentile": 95.0}
    budget = {"ttft_requests": 12.4, "itl_requests": -3.2}
    view = view_of(document(load=FIGURES, targets=targets, error_budget=budget), 0.0)
    assert view.load == (
        "7.2 requests/s  432 tokens/s  TTFT 52.9 ms, p90 96.3 ms (target 500)  ITL -",
        "error budget: TTFT 12 may miss, ITL 3 too many missed",
    )
    assert view_of(document(load=FIGURES), 0.0).load == (
        "7.2 requests/s  432 tokens/s  TTFT 52.9 ms, p95 96.3 ms  ITL -",
    )
    assert view_of(document(load=None), 0.0).load == ("counting requests ...",)
    assert view_of(document(), 0.0).load == ()


def test_tokens_have_a_column_once_two_looks_have_told_them() -> None:
    fast = worker_document(tokens_per_s=466.4)
    view = view_of(document(fast, worker_document("other", tokens_per_s=None)), 0.0)
    assert [row[-1] for row in view.workers] == ["TOK/S", "466", "-"]
    assert view_of(document(), 0.0).workers[0][-1] == "RESTARTS"
    assert view_of(document(), 0.0).workers[1][-1] == "2"


def test_gpus_show_whose_they_are_and_free_ones_are_one_row() -> None:
    busy = gpu_document(0, ("dynamo_VllmWorker",), used_bytes=71 * 2**30, utilisation=0.974, watts=641.7)
    others = gpu_document(1, others=["python (4711)"])
    view = view_of(document(gpus=[busy, others, gpu_document(2), gpu_document(3)]), 0.0)
    assert view.gpus_title == "4 GPUs, H100"
    assert view.gpus[1:] == (
        ("0", "H100", "71 of 80 GB", "97%", "642", "dynamo_VllmWorker"),
        ("1", "H100", "0 of 80 GB", "-", "-", "python (4711)"),
        ("2,3", "H100", "-", "-", "-", "free"),
    )
    assert view_of(document(gpus=[gpu_document(0)]), 0.0).gpus[1][-1] == "free"


def test_gpus_of_several_names_keep_their_names() -> None:
    other = gpu_document(1, ("b",), name="L4", memory_bytes=0)
    view = view_of(document(gpus=[gpu_document(0, ("a",)), other]), 0.0)
    assert view.gpus_title == "2 GPUs"
    assert render_page(view).splitlines()[-2].split()[:6] == ["0", "H100", "0", "of", "80", "GB"]
    assert view_of(document(), 0.0).gpus == ()


def test_gpus_that_were_not_read_are_not_shown() -> None:
    plain = {key: gpu_document(0)[key] for key in ("index", "name", "memory_bytes", "workers")}
    assert view_of(document(gpus=[plain]), 0.0).gpus == ()


def test_a_page_of_80_columns_is_no_wider() -> None:
    rows = [worker_document(f"dynamo_PrefillWorker_{index}", tokens_per_s=1.0) for index in range(9)]
    gpus = [gpu_document(index, (f"dynamo_PrefillWorker_{index}",)) for index in range(8)]
    shown = document(*rows, gpus=gpus, load=FIGURES, last_decision="16:00:00  no change: " + "word " * 30)
    lines = click.unstyle(render_page(view_of(shown, 0.0), 80)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("last decision 16:00:00") for line in lines)


def test_what_waits_failed_or_is_ignored_has_a_paragraph_each() -> None:
    failed = worker_document(state="failed", reason="exit code 78")
    lost = worker_document("lost", state="starting", reason="its registration is gone")
    alone = worker_document("alone", is_managed=False)
    held = {"decode": {"at_least": 1, "at_most": 1}}
    shown = document(
        failed,
        lost,
        alone,
        holds=held,
        troubles=["the planner has ended."],
        waits={"VllmWorker": "0 of 8 are free"},
        ignored_keys={"v1/x": "no number"},
        not_callable={"v1/y": "tcp"},
    )
    notes = "\n".join(view_of(shown, 0.0).notes)
    for part in (
        "the planner has ended.",
        "unmanaged, so that serve neither restarts nor ends them: alone",
        "decode is held at 1",
        "exit code 78\n  `dynaplan scale decode=3` tries again at once.",
        "lost: its registration is gone",
        "VllmWorker waits: 0 of 8 are free",
        "ignored: v1/x: no number",
        "not callable: v1/y is reached by tcp",
    ):
        assert part in notes


def test_a_worker_that_leaves_is_named_with_the_reason() -> None:
    why = "1 of 2 VllmWorker wanted"
    leaving = worker_document("box_VllmWorker_1", state="draining", reason=why)
    assert f"box_VllmWorker_1 leaves: {why}" in view_of(document(leaving), 0.0).notes


def test_the_order_of_queued_prompts_stands_beside_the_policy() -> None:
    shown = view_of(document(policy="sla", dispatch="by deadline, 500 ms (Planner.ttft)"), 0.0).service
    assert "policy sla  prompts by deadline, 500 ms (Planner.ttft)  ready" in shown


def test_the_policies_of_models_with_planners_of_their_own_are_shown() -> None:
    planned = {"ant": {"policy": "load"}, "bee": {"policy": "sla"}}
    shown = view_of(document(policy=None, planned_models=planned), 0.0)
    assert "policy load for ant, policy sla for bee" in shown.service
    assert shown.planners == (), "nothing was polled"


def test_each_planned_model_that_is_loaded_has_a_line_with_its_load_its_targets_and_its_last_decision() -> (
    None
):
    targets = {"ttft_ms": 250.0, "itl_ms": 50.0, "ttft_percentile": 99.0, "itl_percentile": 95.0}
    budget = {"ttft_requests": 3.0, "itl_requests": 4.0}
    bee = {"policy": "sla", "targets": targets, "load": FIGURES, "error_budget": budget}
    planned = {
        "ant": {
            "policy": "load",
            "targets": None,
            "load": None,
            "last_decision": "16:00:00  no change: idle",
        },
        "bee": bee,
        "cow": {"policy": "load", "targets": None, "load": FIGURES},
    }
    states = {"ant": "ready", "bee": "loading", "cow": "unloaded"}
    on_request = {name: model_document(state=state) for name, state in states.items()}
    events = [{"at_unix_s": 0.0, "model": "bee", "sentence": "load: asked for"}]
    shown = document(policy=None, planned_models=planned, on_request=on_request, model_events=events)
    view = view_of(shown, 0.0)
    assert view.planners == (
        "ant: policy load  counting requests ...  last decision 16:00:00  no change: idle",
        "bee: policy sla  7.2 requests/s  432 tokens/s  TTFT 52.9 ms, p99 96.3 ms (target 250)  ITL -"
        "  error budget: TTFT 3 may miss, ITL 4 may miss",
    )
    lines = click.unstyle(render_page(view)).splitlines()
    last = next(place for place, line in enumerate(lines) if line.startswith("last decision"))
    assert lines[last].endswith("model bee: load: asked for")
    assert lines[last + 1].startswith("ant: policy load")


def test_what_was_learnt_of_the_steps_is_the_last_note() -> None:
    learnt = "decode workers: learnt from 41,000 steps"
    assert view_of(document(learnt=[learnt]), 0.0).notes[-1] == learnt
