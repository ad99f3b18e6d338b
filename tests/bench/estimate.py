"""Fits the roofline of ``profile-sla --estimate``, by shipped profiles: ``python -m tests.bench.estimate``.

Least squares of relative errors, each profile's prefill and decode half of the same weight; no part is faster
than the data sheet allows (multiples of at least 1).

The profiles of the 70B model are not of decoding alone: their prompts were computed while others decoded.
With prompts that take ``P(isl)`` each, the requests of a load wait for ``(b - 1) / 2`` of them in the mean
during their ``osl`` tokens, so that::

    measured ITL = step + (b - 1) / 2 x (P(isl) - P(0)) / osl           osl 500, isl = context - osl / 2

``P`` is the parabola through the same profile's TTFT, continued. The total time of a load, which the measured
throughput gives, says the same: b osl / throughput = b P(isl) + osl x step, within 5 %. The profile of the 8B
model has no such part: its throughput is b / ITL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy
from scipy.optimize import lsq_linear

from dynaplan.engines.sim.profiles import SHIPPED_DIR
from dynaplan.lab.profiling.gpu_sheets import GPU_SHEETS
from dynaplan.lab.profiling.model_shape import ModelShape, shape_of
from dynaplan.lab.profiling.roofline import FitError, Roofline, Terms

OSL_TOKENS = 500
"""The length of the answers that the profiles were measured with."""

MOST_REQUESTS = 1024
"""The request slots of the measured engine: more requests than these did not decode together."""

USED_FRACTION = 0.9
"""The part of a GPU's memory that vLLM takes by default."""

ODD = {("h100_sxm-Llama-3.3-70B-Instruct-FP8-tp8", 6205)}
"""Prefill points that are left out: 498 ms between neighbours of 162 and 321."""

LEAST = Terms(0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
"""The least multiples: a data sheet's time is not beaten."""

_COMMON = {"num_key_value_heads": 8, "vocab_size": 128256, "quantization_config": {"quant_method": "fp8"}}
MODELS = {
    "8B": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "70B": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
}
"""From the config.json of nvidia/Llama-3.1-8B-Instruct-FP8 and nvidia/Llama-3.3-70B-Instruct-FP8."""


@dataclass(frozen=True)
class Shipped:
    """A shipped profile, as the fit sees it."""

    name: str
    document: dict[str, Any]

    @property
    def is_mixed(self) -> bool:
        """Whether prompts were computed beside the measured decoding."""
        return "70B" in self.name

    @cached_property
    def roofline(self) -> Roofline:
        """The engine that was measured."""
        size = next(size for size in MODELS if f"-{size}-" in self.name)
        shape: ModelShape = shape_of({**_COMMON, **MODELS[size]}, self.name)
        return Roofline(shape, GPU_SHEETS[self.document["gpu"]], self.document["tensor_parallel_size"])

    def prefill(self) -> list[tuple[Terms, float]]:
        """What each prompt consists of, and its measured TTFT in s."""
        return [(self.roofline.prefill_terms(isl), ttft / 1000) for isl, ttft in self._prompts()]

    def decode(self) -> list[tuple[Terms, float]]:
        """What each step consists of, and its measured time in s."""
        beside_ms = numpy.polynomial.Polynomial.fit(*zip(*self._prompts(), strict=True), 2)
        found = []
        keys = ("x_kv_usage", "y_context_length", "z_itl")
        for usage, context, itl_ms in zip(*(self.document[key] for key in keys), strict=True):
            kv_tokens = usage * self.document["max_kv_tokens"]
            requests = round(kv_tokens / context)
            if requests > MOST_REQUESTS:
                continue
            if self.is_mixed:
                prompt_ms = beside_ms(context - OSL_TOKENS / 2) - beside_ms(0)
                itl_ms -= (requests - 1) / 2 * prompt_ms / OSL_TOKENS
            found.append((self.roofline.decode_terms(requests, kv_tokens), itl_ms / 1000))
        return found

    def reserved_bytes(self) -> float:
        """The bytes of a GPU that are neither weights nor KV entries, of those that the engine takes."""
        engine, size = self.roofline, self.document["tensor_parallel_size"]
        kv_bytes = self.document["max_kv_tokens"] * engine.shape.kv_token_bytes(size, 2.0)
        return USED_FRACTION * engine.gpu.memory_bytes - engine.shape.held_bytes / size - kv_bytes

    def _prompts(self) -> list[tuple[float, float]]:
        pairs = zip(self.document["prefill_isl"], self.document["prefill_ttft"], strict=True)
        return [pair for pair in pairs if (self.name, pair[0]) not in ODD]


def shipped() -> list[Shipped]:
    """Every shipped profile, by name."""
    paths = sorted(SHIPPED_DIR.glob("*.json"))
    return [Shipped(path.stem, json.loads(path.read_text())) for path in paths]


def fit(profiles: Sequence[Shipped]) -> Terms:
    """The multiples with the least squared relative error."""
    rows: list[numpy.ndarray] = []
    wanted: list[float] = []
    for half in [half for profile in profiles for half in (profile.prefill(), profile.decode())]:
        weight = len(half) ** -0.5
        rows += [weight * numpy.array(astuple(terms)) / seconds for terms, seconds in half]
        wanted += [weight] * len(half)
    matrix = numpy.array(rows)
    scale = numpy.maximum(matrix.max(0), 1e-12)
    solved = lsq_linear(matrix / scale, wanted, (numpy.array(astuple(LEAST)) * scale, numpy.inf))
    return Terms(*(float(value) for value in solved.x / scale))


def error_on(profile: Shipped, multiples: Terms) -> FitError:
    """The error of these multiples on a profile."""
    numbers = []
    for half in (profile.prefill(), profile.decode()):
        errors = [abs(terms.times(multiples) / seconds - 1) for terms, seconds in half]
        numbers += [float(numpy.median(errors)), max(errors)]
    return FitError(*(round(each, 3) for each in numbers))


def left_out() -> dict[str, FitError]:
    """The error on each profile of the fit to the others."""
    profiles = shipped()
    return {
        each.name: error_on(each, fit([other for other in profiles if other is not each]))
        for each in profiles
    }


def reserved_bytes() -> float:
    """The mean over the measured engines; the profiles of one model share one KV cache size: that of TP 2."""
    kinds = {each.roofline.gpu: each for each in reversed(shipped())}
    return sum(each.reserved_bytes() for each in kinds.values()) / len(kinds)


if __name__ == "__main__":
    multiples = fit(shipped())
    print("FITTED =", multiples)
    print(f"RESERVED_BYTES = {reserved_bytes():.2e}")
    for name, error in left_out().items():
        print(f'    "{name}": {error},')
    for profile in shipped():
        print("    in the fit:", profile.name, error_on(profile, multiples))
