"""The power of each model, and the energy of its tokens.

The workers of a GPU have equal parts of its power, those that are idle or asleep included. Not by memory:
what a GPU holds adds less than 0.02 W/GB to what it draws, while a process with a CUDA context keeps it awake
(arXiv 2605.23918). And not by work: the drivers of many GPUs do not tell whose it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from dynaplan.graph.lifecycle import HOLDS_GPUS, Worker

WINDOW_S = 60.0
"""The time over which the energy of a token is measured, where readings come as often."""


def watts_by_model(
    watts: Mapping[int, float], workers: Iterable[Worker], models: Mapping[str, str]
) -> dict[str, float]:
    """Return the power of each model. ``watts`` are by GPU, ``models`` the models of components.

    A worker of a component without a model counts for the component.
    """
    sharers: dict[int, list[str]] = {index: [] for index in watts}
    for worker in workers:
        for index in worker.gpus if worker.pid and worker.state in HOLDS_GPUS else ():
            if index in sharers:
                sharers[index].append(models.get(worker.component, worker.component))
    found: dict[str, float] = {}
    for index, names in sharers.items():
        for name in names:
            found[name] = found.get(name, 0.0) + watts[index] / len(names)
    return found


@dataclass(frozen=True)
class ModelPower:
    """The power of a model now, and its energy per 1,000 tokens lately; None where it had no tokens."""

    watts: float
    wh_per_1000_tokens: float | None = None


@dataclass(frozen=True)
class _Reading:
    at_s: float
    watts: Mapping[str, float]
    new_tokens: Mapping[str, float]
    """Those since the reading before, by model."""


SourceModel = tuple[str, str]
"""Who counts the tokens, such as a frontend, and the model whose they are."""


class PowerMeter:
    """Sums up power and tokens of models over the last readings."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()
        self._seen: dict[SourceModel, tuple[float, float]] = {}

    def add(
        self, at_s: float, watts: Mapping[str, float], tokens: Mapping[SourceModel, float]
    ) -> dict[str, ModelPower]:
        """Take a reading of the power by model, and of the tokens so far; return what is known now.

        Tokens count by how much a source has more than when it was last seen in the window: one that is new,
        and one that has fewer, as after its restart, begin anew. So does all after a reading that is later.
        """
        if self._readings and at_s < self._readings[-1].at_s:
            self._readings.clear()
            self._seen.clear()
        while len(self._readings) > 1 and at_s - self._readings[0].at_s > WINDOW_S:
            self._readings.popleft()
        self._readings.append(_Reading(at_s, watts, self._new_tokens(at_s, tokens)))
        return {model: ModelPower(now, self._wh_per_1000_tokens(model)) for model, now in watts.items()}

    def _new_tokens(self, at_s: float, tokens: Mapping[SourceModel, float]) -> dict[str, float]:
        begin_s = self._readings[0].at_s if self._readings else at_s
        self._seen = {key: seen for key, seen in self._seen.items() if seen[0] >= begin_s}
        found: dict[str, float] = {}
        for key, count in tokens.items():
            _, before = self._seen.get(key, (at_s, count))
            found[key[1]] = found.get(key[1], 0.0) + max(0.0, count - before)
            self._seen[key] = at_s, count
        return found

    def _wh_per_1000_tokens(self, model: str) -> float | None:
        tokens = sum(now.new_tokens.get(model, 0.0) for _, now in pairwise(self._readings))
        joules = sum(
            (now.at_s - before.at_s) * (before.watts.get(model, 0.0) + now.watts.get(model, 0.0)) / 2
            for before, now in pairwise(self._readings)
        )
        return joules / 3.6 / tokens if tokens > 0 else None
