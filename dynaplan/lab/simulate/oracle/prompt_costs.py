"""The seconds that workers take to compute each prompt, by the number of workers that serve.

Where prefixes are cached, a prompt costs T(its tokens) - T(the tokens found cached), and these are not known
from the trace: each worker has a cache of its own, which loses what was not used for longest when its KV
memory is full, and the router decides whose cache a prompt meets. With n workers behind a router that takes
turns, an n-th of what came before may be found, and an n-th of it is pushed out by others. So

    c(r, n)    the seconds that prompt r takes while n workers serve

is measured, not modelled: the simulator has the router, the caches and the choice. First

    c(r, n) = the seconds in a simulation of the static schedule with n workers that compute prompts

one simulation for each n that a search asks for. Once a schedule with levels n(w) has been simulated, and a
search goes on from it, what was measured there takes the place of its own entries:

    c(r, n(w)) = the seconds in that simulation, for each prompt r that arrives in window w

So a quick model that runs the very schedule that was simulated computes what the simulated service does:
also the empty caches of workers that have just started, and what is lost with a worker. For a change of the
schedule, windows that keep their level keep their costs, and the others have those of the static schedule.
What is left out is the effect of a change on the caches of later windows; the simulation that follows each
search measures it. A prompt that was never computed there (it was refused) has the least cost
(``TraceArrays.least_prefill_s``).

Without block hashes, or without prefix caching, no prompt finds anything, and c is the same for all n.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from dynaplan.lab.simulate.oracle.trace_arrays import TraceArrays


class PromptCosts:
    """c(r, n) of the module's page. ``of_static`` measures it for a number of workers that stays."""

    def __init__(self, of_static: Callable[[int], array[float]]) -> None:
        self._of_static = of_static
        self._measured: dict[int, array[float]] = {}
        self._now: dict[int, array[float]] = {}

    def at(self, workers: int) -> array[float]:
        """Return the seconds of every prompt, by the number of its request, while that many workers serve."""
        return self._now.get(workers) or self._static(workers)

    def follow(self, arrays: TraceArrays, levels: Sequence[int], computed_s: array[float]) -> None:
        """Take over the seconds measured in a simulation of these levels, in place of earlier ones."""
        self._now = {level: array("d", self._static(level)) for level in set(levels)}
        for window, level in enumerate(levels):
            first, end = arrays.first[window], arrays.first[window + 1]
            self._now[level][first:end] = computed_s[first:end]

    def _static(self, workers: int) -> array[float]:
        if workers not in self._measured:
            self._measured[workers] = self._of_static(workers)
        return self._measured[workers]
