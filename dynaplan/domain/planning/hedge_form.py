"""The hedge's memory as plain data: one list for each expert, of which a box of 8 GPUs has 56.

With names, and with every digit, a line of ``decisions.jsonl`` would have 90 kB, nine tenths of it experts.
Six significant digits, and six places, are more than the fluid that the numbers come from is right to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

from dynaplan.domain.planning.sizing import Decoding, ExpertTrial, Hedge, Lived, Missed
from dynaplan.domain.planning.targets import Targets


def hedge_to_json(hedge: Hedge) -> dict[str, Any]:
    """Return plain data that ``hedge_from_json`` reads back, its numbers to six significant digits."""
    lived = hedge.lived
    return {
        **asdict(replace(hedge, trials=(), lived=Lived())),
        "trials": [_trial_to_json(each) for each in hedge.trials],
        "lived": {
            "trial": _trial_to_json(lived.trial),
            "late": lived.late,
            "long": lived.long,
            "older": _trial_to_json(lived.older),
        },
    }


def hedge_from_json(document: Mapping[str, Any]) -> Hedge:
    """Read the form of ``hedge_to_json``, or of ``dataclasses.asdict``, as earlier versions wrote it.

    Raises KeyError, TypeError or ValueError for another.
    """
    document = dict(document)
    if least := document.pop("least", None):  # as earlier versions wrote it
        document.setdefault("leasts", (least,))
    trusted, lived = document.get("trusted"), document.get("lived")
    known = {
        name: tuple(Targets(**each) for each in document.get(name, ())) for name in ("followed", "leasts")
    }
    trials = {name: _trial_from_json(lived[name]) for name in ("trial", "older") if lived and name in lived}
    return Hedge(
        **{
            **document,
            "trials": tuple(_trial_from_json(each) for each in document.get("trials", ())),
            **known,
            **{name: Targets(**document.get(name, {})) for name in ("most", "newest")},
            "trusted": _trusted_from_json(*trusted) if trusted else None,
            "lived": Lived(**{**lived, **trials}) if lived else Lived(),
        }
    )


def _trusted_from_json(workers: Mapping[str, Any], follows: bool) -> tuple[Targets, bool]:
    return Targets(**workers), follows


def _trial_to_json(trial: ExpertTrial) -> list[Any]:
    workers, decoding = trial.workers, trial.decoding
    waits, gone_along_s = (trial.queue, trial.in_time, trial.late_s), (trial.chased_s, trial.helped_s)
    return [
        [workers.prefill, workers.decode, trial.follows],
        _short((*waits, *gone_along_s, trial.held_gpu_s, decoding.counted)),
        _short(astuple(trial.late)),
        _short(astuple(trial.long)),
        _short(decoding.requests),
        _short(decoding.step_ms),
    ]


def _short(numbers: Sequence[float]) -> list[float]:
    return [float(f"{round(number, 6):.6g}") for number in numbers]


def _trial_from_json(document: Any) -> ExpertTrial:
    """Read an expert's list, or its mapping by names, as earlier versions wrote it."""
    if isinstance(document, Mapping):
        return _trial_by_names(document)
    (prefill, decode, follows), numbers, late, long, requests, step_ms = document
    queue, in_time, late_s, chased_s, helped_s, held_gpu_s, counted = numbers
    return ExpertTrial(
        Targets(prefill, decode),
        follows,
        queue,
        in_time,
        late_s,
        Decoding(tuple(requests), tuple(step_ms), counted),
        chased_s,
        helped_s,
        held_gpu_s,
        Missed(*late),
        Missed(*long),
    )


def _trial_by_names(document: Mapping[str, Any]) -> ExpertTrial:
    missed = {name: Missed(**document[name]) for name in ("late", "long")}
    workers, decoding = Targets(**document["workers"]), decoding_from_json(document.get("decoding"))
    return ExpertTrial(**{**document, "workers": workers, **missed, "decoding": decoding})


def decoding_from_json(document: Any) -> Decoding:
    """Read what ``dataclasses.asdict`` makes; nothing decodes where earlier versions wrote a mere number."""
    if not isinstance(document, Mapping):
        return Decoding()
    stages = {name: tuple(document[name]) for name in ("requests", "step_ms")}
    return Decoding(**{**document, **stages})
