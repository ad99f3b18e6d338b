"""All that the burst mechanisms remember between two decisions, and its form in ``decisions.jsonl``.

The hedge has one list for each expert, of which a box of 8 GPUs has 56. With names, and with every digit, a
line would have 90 kB, nine tenths of it experts. Six significant digits, and six places, are more than the
fluid that the numbers come from is right to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from dynaplan.fleet.counts import Targets


@dataclass(frozen=True)
class Decoding:
    """The requests that decode in a fluid (``standing.py``), by the stage of their answer.

    ``step_ms`` is the mean of their steps so far, by stage. ``counted`` of them missed a target already.
    """

    requests: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()
    counted: float = 0.0

    @property
    def total(self) -> float:
        """The number of requests that decode, in every stage."""
        return sum(self.requests)


@dataclass(frozen=True)
class StandingTrial:
    """One number of workers that never changes, as it would have fared (``standing.py``).

    ``load`` are the prompts that wait, or the requests that decode; ``late`` the requests that were late, the
    past of one ``slo-window`` ago counting 37 %. ``decoding`` are the requests that decode.
    """

    load: float = 0.0
    late: float = 0.0
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class Standing:
    """Trials of every number of workers of each role, from 1 on; ``requests`` came, faded as ``late``."""

    requests: float = 0.0
    prefill: tuple[StandingTrial, ...] = ()
    decode: tuple[StandingTrial, ...] = ()


@dataclass(frozen=True)
class Missed:
    """Requests that missed a target, and the doubt of their number: bursts are few, however large.

    ``requests`` fade with ``slo-window``, ``squares`` (of the misses of each burst) twice as fast. ``run``
    are the misses of the burst that goes on, for ``run_s`` seconds until now.
    """

    requests: float = 0.0
    squares: float = 0.0
    run: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True)
class ExpertTrial:
    """One expert on the number of workers, as it would have fared (``experts.py``).

    It stands still at ``workers``, or ``follows`` the forecast and has at least these. ``queue`` are prompts
    that wait, ``in_time`` those of them that can still be in time; late ones have waited for ``late_s``.
    ``decoding`` are the requests that decode. One that stands still has gone along with the forecast for
    ``chased_s``, and for ``helped_s`` of these because a burst lasts. ``held_gpu_s`` are the GPU-seconds that
    it held, faded with ``slo-window``; ``late`` are requests over the TTFT, ``long`` others over the ITL.
    """

    workers: Targets = field(default_factory=Targets)
    follows: bool = True
    queue: float = 0.0
    in_time: float = 0.0
    late_s: float = 0.0
    decoding: Decoding = field(default_factory=Decoding)
    chased_s: float = 0.0
    helped_s: float = 0.0
    held_gpu_s: float = 0.0
    late: Missed = field(default_factory=Missed)
    long: Missed = field(default_factory=Missed)

    def emptied(self) -> ExpertTrial:
        """Return the trial after an interval without requests."""
        return replace(self, queue=0.0, in_time=0.0, decoding=Decoding())


@dataclass(frozen=True)
class Lived:
    """The workers that served, by the fluid (``trial``), beside what was counted with them.

    ``late`` requests were over the TTFT, ``long`` others over the ITL; both fade with ``slo-window``.
    ``older`` are the workers that were there before others came, while they have more than their share.
    """

    trial: ExpertTrial = field(default_factory=ExpertTrial)
    late: float = 0.0
    long: float = 0.0
    older: ExpertTrial = field(default_factory=ExpertTrial)


@dataclass(frozen=True)
class Hedge:
    """The hedge's memory; sums fade with ``slo-window``.

    ``followed`` are the workers that the forecast needed in the last intervals, the newest last; ``most``
    the most of what it needed before them, ``newest`` of that what it needed in the last ``newest_s``.
    ``seconds`` were seen, in which ``requests`` came; their mean load needed the ``leasts``, the newest last.
    ``trusted`` is the expert that is asked: its workers, and whether it follows; None before any was tried.
    ``lived`` are the workers that served, whatever any expert wanted.
    """

    trials: tuple[ExpertTrial, ...] = ()
    followed: tuple[Targets, ...] = ()
    seconds: float = 0.0
    requests: float = 0.0
    leasts: tuple[Targets, ...] = ()
    most: Targets = field(default_factory=Targets)
    newest: Targets = field(default_factory=Targets)
    newest_s: float = 0.0
    trusted: tuple[Targets, bool] | None = None
    lived: Lived = field(default_factory=Lived)

    @property
    def least(self) -> Targets:
        """The workers that the mean load needs now."""
        return self.leasts[-1] if self.leasts else Targets()


@dataclass(frozen=True)
class BurstMemory:
    """What the learnt floor knows (``standing``), and what the hedge does."""

    standing: Standing = field(default_factory=Standing)
    hedge: Hedge = field(default_factory=Hedge)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back; the hedge's numbers to six significant digits."""
        return {"standing": asdict(self.standing), "hedge": hedge_to_json(self.hedge)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BurstMemory:
        """Read the form of ``to_json``; raises KeyError, TypeError or ValueError for another."""
        return cls(_standing(document["standing"]), hedge_from_json(document["hedge"]))


def _standing(document: Mapping[str, Any]) -> Standing:
    trials = {
        role: tuple(
            StandingTrial(**{**each, "decoding": decoding_from_json(each.get("decoding"))})
            for each in document.get(role, ())
        )
        for role in ("prefill", "decode")
    }
    return Standing(**{**document, **trials})


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
