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
    tokens: Mapping[str, float]


class PowerMeter:
    """Sums up power and tokens of models over the last readings."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def add(
        self, at_s: float, watts: Mapping[str, float], tokens: Mapping[str, float]
    ) -> dict[str, ModelPower]:
        """Take a reading of the power and of the tokens so far, by model; return what is known now.

        Tokens that fell are those of restarted frontends: the counting begins anew.
        """
        if self._readings and any(tokens.get(each, 0) < n for each, n in self._readings[-1].tokens.items()):
            self._readings.clear()
        self._readings.append(_Reading(at_s, watts, tokens))
        while len(self._readings) > 2 and at_s - self._readings[0].at_s > WINDOW_S:
            self._readings.popleft()
        return {model: ModelPower(now, self._wh_per_1000_tokens(model)) for model, now in watts.items()}

    def _wh_per_1000_tokens(self, model: str) -> float | None:
        first, last = self._readings[0], self._readings[-1]
        tokens = last.tokens.get(model, 0.0) - first.tokens.get(model, 0.0)
        joules = sum(
            (now.at_s - before.at_s) * (before.watts.get(model, 0.0) + now.watts.get(model, 0.0)) / 2
            for before, now in pairwise(self._readings)
        )
        return joules / 3.6 / tokens if tokens > 0 else None
