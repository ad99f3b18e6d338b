"""The times of an engine's steps by a model's shape and a GPU's data sheet: a roofline, fitted.

Every part of a step has the time that the data sheet allows for it; the real time is a multiple of that, and
the multiples (``FITTED``) are fitted to the shipped profiles. Of a model with ``W`` bytes of weights, split
over ``t`` GPUs::

    prefill of n tokens, alone                             a step that decodes b requests with kv tokens of KV
      handling     a fixed time for each request             launches   a fixed time for each layer
      weights      W / t / bandwidth                         weights    W / t / bandwidth
      matrices     2 P n / t / flops                         matrices   2 P m / t / flops
      attention    2 L a d n^2 / t / flops (16 bits)         KV         bytes of kv / bandwidth
      links        2 L h n 2 bytes / link, if t > 1          links      2 L h b 2 bytes / link, if t > 1
                                                             requests   a fixed time for each, and layer

``P`` are the parameters of the layers. In a decode step the first ``TILE_ROWS`` requests are multiplied while
the weights are read, and each further tile of as many rows takes its own time: ``m`` is
``TILE_ROWS (ceil(b / TILE_ROWS) - 1)``. That is what the measurements show: ITL jumps at 128 and at 256.
Time for links does not depend on the number of GPUs, as measured at 2, 4 and 8.

The fit is `python -m tests.bench.estimate`; its sources and its error are in docs/guides/profile-sla.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from dynaplan.lab.profiling.gpu_sheets import GpuSheet
from dynaplan.lab.profiling.model_shape import ModelShape

TILE_ROWS = 128
"""Rows of a matrix that one tile of the usual GEMM kernels covers."""

ACTIVATION_BYTES = 2
"""Bytes of one activation that is sent between GPUs."""


@dataclass(frozen=True)
class Terms:
    """One number for each part of a step: a time in s, or a multiple of the time that the data sheet allows.

    ``request``, ``layer`` and ``sequence`` are seconds for each request, layer, and layer and sequence; as
    parts of a step they are the number of these.
    """

    request: float = 0.0
    layer: float = 0.0
    weights: float = 0.0
    matrices: float = 0.0
    attention: float = 0.0
    links: float = 0.0
    kv: float = 0.0
    sequence: float = 0.0

    def times(self, other: Terms) -> float:
        """Return the sum of the products, in s."""
        return float(sum(mine * theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class FitError:
    """The error of a fit on a profile that it did not see, as a part of the measured time."""

    ttft_median: float
    ttft_most: float
    itl_median: float
    itl_most: float


@dataclass(frozen=True)
class Roofline:
    """An engine: a model split over ``tensor_parallel_size`` GPUs. ``kv_value_bytes`` is of one KV number."""

    shape: ModelShape
    gpu: GpuSheet
    tensor_parallel_size: int = 1
    kv_value_bytes: float = 2.0

    def prefill_terms(self, tokens: float) -> Terms:
        """Return what the prefill of one prompt of that many tokens consists of."""
        shape = self.shape
        squared = 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
        return Terms(
            request=1.0,
            weights=self._weights_s,
            matrices=self._matrices_s(tokens),
            attention=squared / self.tensor_parallel_size / self.gpu.flops(16),
            links=self._links_s(tokens),
        )

    def decode_terms(self, requests: float, kv_tokens: float) -> Terms:
        """Return what one step of that many requests with together ``kv_tokens`` of KV consists of."""
        token_bytes = self.shape.kv_token_bytes(self.tensor_parallel_size, self.kv_value_bytes)
        return Terms(
            layer=self.shape.layers,
            weights=self._weights_s,
            matrices=self._matrices_s(TILE_ROWS * (math.ceil(requests / TILE_ROWS) - 1)),
            links=self._links_s(requests),
            kv=token_bytes * kv_tokens / self.gpu.bytes_per_s,
            sequence=self.shape.layers * requests,
        )

    def prefill_ms(self, tokens: float) -> float:
        """Return the TTFT of one prompt alone, in ms."""
        return 1000 * self.prefill_terms(tokens).times(FITTED)

    def decode_ms(self, requests: float, kv_tokens: float) -> float:
        """Return the ms of one step that decodes."""
        return 1000 * self.decode_terms(requests, kv_tokens).times(FITTED)

    def max_kv_tokens(self, used_fraction: float) -> int:
        """Return the tokens that the KV cache holds when the engine takes this part of a GPU's memory.

        0 or less when the weights do not leave room for any.
        """
        free = used_fraction * self.gpu.memory_bytes - RESERVED_BYTES
        free -= self.shape.held_bytes / self.tensor_parallel_size
        return math.floor(free / self.shape.kv_token_bytes(self.tensor_parallel_size, self.kv_value_bytes))

    @property
    def _weights_s(self) -> float:
        return self.shape.read_bytes / self.tensor_parallel_size / self.gpu.bytes_per_s

    def _matrices_s(self, rows: float) -> float:
        flops = self.gpu.flops(self.shape.compute_bits)
        return 2 * self.shape.layer_parameters * rows / self.tensor_parallel_size / flops

    def _links_s(self, rows: float) -> float:
        if self.tensor_parallel_size == 1:
            return 0.0
        sent = 2 * self.shape.layers * self.shape.hidden * rows * ACTIVATION_BYTES
        return sent / self.gpu.link_bytes_per_s


FITTED = Terms(
    request=0.01378,
    layer=9.358e-05,
    weights=1.0,
    matrices=2.045,
    attention=2.044,
    links=2.933,
    kv=1.170,
    sequence=3.733e-07,
)
"""The multiples, fitted to all shipped profiles: vLLM 0.10.1 on H100 and H200."""

RESERVED_BYTES = 3.3e9
"""Bytes of a GPU's memory for activations, CUDA graphs and libraries: the mean of the shipped profiles."""

LEFT_OUT: Mapping[str, FitError] = {
    "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp2": FitError(0.044, 0.072, 0.026, 0.224),
    "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp4": FitError(0.037, 0.069, 0.030, 0.181),
    "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp8": FitError(0.023, 0.080, 0.044, 0.130),
    "h200_sxm-Llama-3.1-8B-Instruct-FP8": FitError(0.082, 0.220, 0.081, 0.283),
}
"""The error on each shipped profile of a fit to the others."""


def origin_words(model: str, gpu_type: str) -> str:
    """Return the words that go with an estimated profile: that it is one, and how far to believe it."""
    errors = LEFT_OUT.values()
    ttft, itl = [each.ttft_median for each in errors], [each.itl_median for each in errors]
    return (
        f"estimated, not measured: a roofline of {model} on {gpu_type}. On shipped profiles that its fit did "
        f"not see, TTFT was off by {min(ttft):.0%} to {max(ttft):.0%} (median of a profile; at most "
        f"{max(each.ttft_most for each in errors):.0%}), ITL by {min(itl):.0%} to {max(itl):.0%} (at most "
        f"{max(each.itl_most for each in errors):.0%})"
    )
