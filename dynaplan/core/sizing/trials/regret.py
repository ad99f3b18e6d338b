"""AdaHedge over a faded past: how far each of several experts is trusted, by what they would have cost.

Each interval the weights come first, then what every expert cost in it. With K experts, first odds p(i), what
each has cost until now L(i), the doubt D, and c = -ln(min p):

    w(i) ~ p(i) exp(-eta L(i)),  eta = c / D
    gap  = sum w(i) l(i) + 1/eta ln sum w(i) exp(-eta l(i))        at least 0
    L(i) <- fade L(i) + l(i),  D <- fade D + gap                   D no less than the first doubt

**Source.** de Rooij, van Erven, Gruenwald and Koolen, "Follow the leader if you can, hedge if you must",
JMLR 15 (2014): AdaHedge. It has no learning rate to choose, knows no range of the costs beforehand, and
follows the leader while one is ahead.

**Bound.** To fade is to let the costs grow: with l'(t) = l(t) fade^-t it is AdaHedge itself, since scale
does not change its weights. So its theorem 8 holds for the faded sums, whatever comes, chosen by an adversary
or not: with s(t) the spread of the costs of an interval and S the largest faded one,

    faded cost of the weighted mean - faded cost of any one expert  <=  2 D
    D  <=  sqrt(first^2 + c sum (faded s(t))^2 / 4) + S (2/3 c + 1)

The past counts as long as the fading lets it: within some windows a better expert is followed, which is what
"tracking" means here (Herbster and Warmuth, 1998, bound the same for a past that does not fade).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def weights(costs: Sequence[float], odds: Sequence[float], doubt: float) -> list[float]:
    """Return the weight of each expert, 1 in all; ``odds`` are the first weights, 1 in all."""
    rate, least = _rate(odds, doubt), min(costs)
    parts = [part * math.exp(-rate * (cost - least)) for cost, part in zip(costs, odds, strict=True)]
    whole = sum(parts)
    return [part / whole for part in parts]


def gap(trusted: Sequence[float], costs: Sequence[float], odds: Sequence[float], doubt: float) -> float:
    """Return how much an interval's costs add to the doubt; 0 where all experts cost the same."""
    rate, least = _rate(odds, doubt), min(costs)
    over = [cost - least for cost in costs]
    mean = sum(weight * cost for weight, cost in zip(trusted, over, strict=True))
    mixed = sum(weight * math.exp(-rate * cost) for weight, cost in zip(trusted, over, strict=True))
    return max(0.0, mean + math.log(max(mixed, 1e-300)) / rate)


def _rate(odds: Sequence[float], doubt: float) -> float:
    return -math.log(min(odds)) / doubt
