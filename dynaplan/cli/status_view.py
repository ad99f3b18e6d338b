"""The document of ``status`` as a person sees it: pure, and the same wherever it is shown.

``view_of`` makes tables and sentences of it; ``render_page`` lays them out, as wide as the screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.cli import keys_view, models_view
from dynaplan.cli.scale_args import describe_hold, describe_hours
from dynaplan.cli.status_document import ENGINE_ROLES, is_lost, routing_lines
from dynaplan.contract.gpus import indices
from dynaplan.contract.holds import Hold, reserved_words
from dynaplan.contract.model_keys import ModelEvent
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.planner.recorders.manual_changes import ManualChange
from dynaplan.util import screen
from dynaplan.util.amounts import gib_of
from dynaplan.util.durations import clock, local_time
from dynaplan.util.tables import fold, text_table

Row = Mapping[str, Any]
Document = Mapping[str, Any]

COLUMNS = ("WORKER", "ROLE", "STATE", "GPUS", "PID", "RUNNING", "WAITING", "KV", "UPTIME", "RESTARTS")
TOKENS = "TOK/S"
"""The column that is there once two polls have measured it."""

WORKER_COLUMNS_DROPPED = ("PID", "UPTIME", "GPUS", "ROLE", "RESTARTS", "KV")
"""The columns that a narrow screen does without, the first first; before them, an engine's usual time."""

GPU_COLUMNS = ("GPU", "NAME", "MEMORY", "BUSY", "WATTS", "WORKERS")


@dataclass(frozen=True)
class View:
    """All that is shown of a deployment, top to bottom; tables have their headings first.

    ``short_workers`` is for a narrow screen. ``names`` are the workers, in the order of the rows. ``places``
    are the addresses of the metrics and the logs. ``planners`` has a line for each model that has a planner
    and is loaded, ``memory`` one for each device whose memory models share. ``keys`` say who asks.
    """

    title: str
    service: str
    places: str
    load: tuple[str, ...]
    workers: tuple[tuple[str, ...], ...]
    short_workers: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    gpus_title: str
    gpus: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    decision: str = ""
    planners: tuple[str, ...] = ()
    models: tuple[tuple[str, ...], ...] = ()
    memory: tuple[str, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()


def view_of(document: Document, now_s: float) -> View:
    """Return what is shown of a document; ``now_s`` is the time of the clock on the wall, in seconds."""
    pid = document["serve_pid"]
    owner = f"serve runs as pid {pid}" if pid else "no serve of it runs here"
    if supervisor := document.get("supervisor_pid"):
        owner += f", its supervisor as {supervisor}"
    if version := document.get("version"):
        owner += f", version {version}"
    rows, on_request = document["workers"], document.get("on_request", {})
    return View(
        title=f"{document['namespace']}  {document['frontend_url']}  {owner}",
        service=_service(document),
        places=_places(document),
        load=_load(document),
        workers=table_rows(rows),
        short_workers=table_rows(rows, is_short=True),
        names=tuple(row["worker"] for row in rows),
        gpus_title=_gpus_title(document),
        gpus=_gpus(document),
        notes=_notes(document, now_s),
        decision=_last_decided(document),
        planners=_planners(document),
        models=tuple(models_view.table_rows(on_request, now_s)) if on_request else (),
        memory=tuple(models_view.memory_lines(document.get("model_memory", ()))),
        keys=keys_view.table_rows(document.get("keys", ())),
    )


def _last_decided(document: Document) -> str:
    """Return what was decided last, by the planner, about a model, or by hand; empty before anything was."""
    decided: list[tuple[float, str]] = [
        (document.get("decided_unix_s", 0.0), document.get("last_decision", ""))
    ]
    for event in document.get("model_events", [])[-1:]:
        decided.append((event["at_unix_s"], models_view.event_line(ModelEvent(**event))))
    for change in document.get("by_hand", []):
        line = f"{local_time(change['at_unix_s'])}  {ManualChange(**change)}"
        decided.append((change["at_unix_s"], line))
    return max(decided)[1]


def table_rows(rows: Sequence[Row], *, is_short: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the workers' table, its headings first; a dash is "not known" or "does not have one"."""
    has_tokens = any(row.get("tokens_per_s") is not None for row in rows)
    headings = (*COLUMNS, TOKENS) if has_tokens else COLUMNS
    return headings, *(_cells(row, has_tokens=has_tokens, is_short=is_short) for row in rows)


def _service(document: Document) -> str:
    """Return the model, the planner's policy, the workers that are asked for, and the free GPUs."""
    if on_request := document.get("on_request"):
        ready = sum(row["state"] == models_view.READY for row in on_request.values())
        parts = [f"models ready {ready} of {len(on_request)}"]
    else:
        parts = [f"model {', '.join(document['models']) or 'not known yet'}"]
    if policy := document.get("policy"):
        parts.append(f"policy {policy}" + (", which only observes" if document.get("observes_only") else ""))
    elif planned := document.get("planned_models"):
        parts.append(", ".join(f"policy {each['policy']} for {model}" for model, each in planned.items()))
    elif document["serve_pid"]:
        parts.append("no planner")
    if (targets := document.get("targets")) and "load" not in document:
        parts.append(f"targets TTFT {targets['ttft_ms']:g} ms, ITL {targets['itl_ms']:g} ms")
    if dispatch := document.get("dispatch"):
        parts.append(f"prompts {dispatch}")
    if desired := document.get("desired"):
        asked = ", ".join(f"{role} {_present(document, role)} of {desired[role]}" for role in desired)
        parts.append(f"ready {asked}" + (" (being carried out)" if document.get("is_pending") else ""))
    if (free := document.get("free_gpus")) is not None and document.get("gpus"):
        parts.append(f"{len(free)} of {len(document['gpus'])} GPUs free")
    return "  ".join(parts)


def _places(document: Document) -> str:
    if not document.get("metrics_url"):
        return ""
    return f"metrics {document['metrics_url']}  logs {document['logs_at']}"


def _present(document: Document, role: str) -> int:
    ready = (row for row in document["workers"] if row["state"] == "ready" and row["is_alive"] is not False)
    return sum(row["role"] == role for row in ready)


def _load(document: Document) -> tuple[str, ...]:
    """Return the traffic of the last minute against its targets; nothing where it was not followed."""
    if "load" not in document:
        return ()
    figures, targets = document["load"], document.get("targets") or {}
    if figures is None:
        return ("counting requests ...",)
    parts = [f"{figures['requests_per_s']:.1f} requests/s", f"{figures['tokens_per_s']:.0f} tokens/s"]
    for name in ("ttft", "itl"):
        parts.append(_times(name, figures, targets))
    if power := document.get("power"):
        parts.append(_power_words(power))
    lines = ["  ".join(parts)]
    budget = document.get("error_budget")
    if targets and budget:
        left = (_budget_words(name, budget[f"{name}_requests"]) for name in ("ttft", "itl"))
        lines.append(f"error budget: {', '.join(left)}")
    return tuple(lines)


def _power_words(power: Mapping[str, Any]) -> str:
    """Return ``642 W, 0.41 Wh per 1,000 tokens``."""
    energy, watts = power["wh_per_1000_tokens"], f"{power['watts']:.0f} W"
    return watts if energy is None else f"{watts}, {energy:.2g} Wh per 1,000 tokens"


def _budget_words(name: str, requests: float) -> str:
    """Return how many requests may still miss a target, or how many too many have."""
    missed = f"{-requests:.0f} too many missed" if requests <= -0.5 else f"{max(0.0, requests):.0f} may miss"
    return f"{name.upper()} {missed}"


def _planners(document: Document) -> tuple[str, ...]:
    """Return the load of each planned model against its targets, and what its planner decided last.

    Those that are not loaded are left out: their planners have nothing to plan.
    """
    lines = []
    for model, planned in document.get("planned_models", {}).items():
        row = document.get("on_request", {}).get(model)
        if "load" in planned and row and row["state"] not in models_view.NOT_LOADED:
            parts = [f"{model}: policy {planned['policy']}", *_load(planned)]
            if decision := planned.get("last_decision"):
                parts.append(f"last decision {decision}")
            lines.append("  ".join(parts))
    return tuple(lines)


def _times(name: str, figures: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    """Return ``TTFT 182 ms, p95 430 ms (target 500)``."""
    mean_ms, high_ms = figures[f"{name}_mean_ms"], figures[f"{name}_percentile_ms"]
    if mean_ms is None or high_ms is None:
        unstreamed = " (no answer was streamed)" if name == "ttft" and figures["requests_per_s"] else ""
        return f"{name.upper()} -{unstreamed}"
    percentile = targets.get(f"{name}_percentile", 95)
    target = f" (target {targets[f'{name}_ms']:g})" if targets else ""
    return f"{name.upper()} {_ms(mean_ms)}, p{percentile:g} {_ms(high_ms)}{target}"


def _ms(time_ms: float) -> str:
    """Return a time with its unit: ``4.48 ms``, ``3210 ms``."""
    return f"{time_ms:.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"


def _gpus(document: Document) -> tuple[tuple[str, ...], ...]:
    """Return the table of the GPUs with its headings; empty without GPUs, or where they were not read.

    Free ones of one name are one row.
    """
    rows = [row for row in document.get("gpus", ()) if "utilisation" in row]
    if not rows:
        return ()
    is_free = [row for row in rows if not (row["workers"] or row["others"] or row.get("reserved"))]
    cells = [_gpu_cells(row) for row in rows if row not in is_free]
    for name in dict.fromkeys(row["name"] for row in is_free):
        free = [row["index"] for row in is_free if row["name"] == name]
        if len(free) == 1:
            cells += [_gpu_cells(row) for row in is_free if row["name"] == name]
        else:
            cells.append((indices(free), name or "-", "-", "-", "-", "free"))
    return GPU_COLUMNS, *cells


def _gpus_title(document: Document) -> str:
    """Return ``8 GPUs``, and their name where all have the same."""
    names = {row["name"] for row in document.get("gpus", ())}
    number = len(document.get("gpus", ()))
    title = "1 GPU" if number == 1 else f"{number} GPUs"
    return f"{title}, {names.pop()}" if len(names) == 1 else title


def _gpu_cells(row: Row) -> tuple[str, ...]:
    used, whole = row["used_bytes"], row["memory_bytes"]
    return (
        str(row["index"]),
        row["name"] or "-",
        "-" if used is None or not whole else gib_of(used, whole),
        "-" if row["utilisation"] is None else f"{row['utilisation']:.0%}",
        "-" if row["watts"] is None else f"{row['watts']:.0f}",
        ", ".join(filter(None, [*row["workers"], *row["others"], row.get("reserved")])) or "free",
    )


def _notes(document: Document, now_s: float) -> tuple[str, ...]:
    """Return a paragraph for everything that is wrong, held, waits, was set by the planner, or learnt."""
    notes = list(document["troubles"])
    if alone := [row["worker"] for row in document["workers"] if not row["is_managed"]]:
        notes.append(f"unmanaged, so that serve neither restarts nor ends them: {', '.join(alone)}")
    notes += hold_lines(document, now_s)
    on_request = document.get("on_request", {})
    notes += models_view.model_notes(on_request)
    told = {row["component"] for row in on_request.values() if row["why"]}
    for row in document["workers"]:
        if row["component"] in told:
            continue
        if row["reason"] and (row["state"] in ("failed", "backoff") or is_lost(row)):
            notes.append(f"{row['worker']}: {row['reason']}{_retry_hint(row, document['workers'])}")
        elif row["reason"] and row["state"] == "draining":
            notes.append(f"{row['worker']} leaves: {row['reason']}")
    notes += routing_lines(document["routing"])
    notes += [f"{name} waits: {reason}" for name, reason in document["waits"].items()]
    notes += [
        f"ignored: {key}: {reason}. Somebody wrote what dynaplan cannot read; delete the key."
        for key, reason in document["ignored_keys"].items()
    ]
    notes += [
        f"not callable: {key} is reached by {reached}. dynaplan calls over HTTP only:"
        " it gets no requests, and is not counted."
        for key, reached in document["not_callable"].items()
    ]
    return (*notes, *document.get("adjusted", ()), *document.get("learnt", ()))


def hold_lines(document: Document, now_s: float) -> list[str]:
    """Return a sentence for each hold, and for each reserved GPU."""
    holds = document.get("holds", {})
    lines = [
        describe_hold(role, Hold.from_json(holds[role.value]), now_s)
        for role in SCALED_ROLES
        if role.value in holds
    ]
    for index, made in document.get("reservations", {}).items():
        hold = Hold.from_json(made)
        changes = f": {describe_hours(hold, now_s)}" if hold.at else ""
        ending = f"`kill {hold.holder.pid}`" if hold.holder else f"`dynaplan release gpu={index}`"
        lines.append(f"GPU {index} is {reserved_words(hold)}{changes}; {ending} ends that")
    return lines


def _cells(row: Row, *, has_tokens: bool, is_short: bool) -> tuple[str, ...]:
    known = {key: "-" if row[key] is None else str(row[key]) for key in ("running", "waiting")}
    cells = (
        row["worker"],
        row["role"],
        _state(row, is_short=is_short),
        ",".join(map(str, row["gpus"])) or "-",
        str(row["pid"] or "-"),
        known["running"],
        known["waiting"],
        "-" if row["kv_usage"] is None else f"{row['kv_usage']:.1%}",
        "-" if row["uptime_s"] is None else clock(row["uptime_s"]),
        str(row["restarts"]),
    )
    tokens = row.get("tokens_per_s")
    return (*cells, "-" if tokens is None else f"{tokens:.0f}") if has_tokens else cells


def _state(row: Row, *, is_short: bool) -> str:
    """Return ``loading 00:23 (usually 00:41)`` for a worker whose engine starts, else its state.

    The usual time is left out of what is to be short. A worker that waits for its GPU is "waiting", one that
    is draining says since when. A worker whose process is gone, which the fleet plugin has not noticed or
    cannot notice, is "dead".
    """
    if row["is_alive"] is False:
        return "dead"
    if row["waits"]:
        return "waiting"
    if row["draining_s"] is not None:
        return f"draining {clock(row['draining_s'])}"
    if row["loading_s"] is None:
        return str(row["state"])
    usually = "" if row["usually_s"] is None or is_short else f" (usually {clock(row['usually_s'])})"
    return f"loading {clock(row['loading_s'])}{usually}"


def _retry_hint(row: Row, rows: Sequence[Row]) -> str:
    """Return the command that tries a failed worker again at once, as a line of its own; empty for others."""
    if row["state"] != "failed" or row["role"] not in ENGINE_ROLES:
        return ""
    present = (each for each in rows if each["component"] == row["component"])
    number = sum(each["state"] != "draining" for each in present)
    return f"\n  `dynaplan scale {row['role']}={number}` tries again at once."


GPU_COLUMNS_DROPPED = ("NAME", "WATTS", "MEMORY")
"""The columns of the GPUs that a narrow screen does without, the first first."""


def render_page(view: View, width: int = 0) -> str:
    """Return the whole text; ``width`` is that of the screen in columns, 0 for any."""
    parts = [
        render_lines(filter(None, [view.title, view.service, view.places]), width),
        render_lines(view.load, width),
        render_decision(view, width),
        render_models(view, width),
        render_lines(view.memory, width),
        render_keys(view, width),
        render_workers(view, width),
        render_gpus(view, width),
        *(render_lines([note], width) for note in view.notes),
    ]
    return "\n\n".join(filter(None, parts))


def render_lines(lines: Iterable[str], width: int) -> str:
    """Return the lines as one text, each wrapped at ``width`` columns."""
    return "\n".join(fold(line, width, "  ") for line in lines)


def render_decision(view: View, width: int = 0) -> str:
    """Return the last decision, and a line for each planned model; empty before there is one."""
    last = [f"last decision {view.decision}"] if view.decision else []
    return render_lines([*last, *view.planners], width)


def render_workers(view: View, width: int = 0) -> str:
    """Lay the workers out under their headings; a narrow screen does without ``WORKER_COLUMNS_DROPPED``."""
    return render_worker_table(view.workers, view.short_workers, width)


def render_worker_table(
    rows: Sequence[Sequence[str]], short_rows: Sequence[Sequence[str]], width: int = 0
) -> str:
    """Lay rows out, or the short ones where those are wider than ``width`` columns (0 for any width)."""
    is_narrow = bool(width) and max(map(len, text_table(rows).splitlines())) > width
    chosen = short_rows if is_narrow else rows
    return text_table(
        chosen, width=width, dropping=WORKER_COLUMNS_DROPPED, paint={"STATE": screen.state_coloured}
    )


def render_models(view: View, width: int = 0) -> str:
    """Lay the models out under their headings; empty where none is loaded on request."""
    return text_table(view.models, width=width, dropping=models_view.COLUMNS_DROPPED) if view.models else ""


def render_keys(view: View, width: int = 0) -> str:
    """Lay out who asks, by the names of keys; empty where nobody with a key does."""
    return text_table(view.keys, width=width, dropping=keys_view.COLUMNS_DROPPED) if view.keys else ""


def render_gpus(view: View, width: int = 0) -> str:
    """Lay the GPUs out under their headings; empty without any."""
    if not view.gpus:
        return ""
    is_same = len({row[1] for row in view.gpus[1:]}) == 1
    rows = [(*row[:1], *row[2:]) for row in view.gpus] if is_same else view.gpus
    return f"{view.gpus_title}\n{text_table(rows, width=width, dropping=GPU_COLUMNS_DROPPED)}"
