"""How fast this machine reads memory and computes: what is known of an engine's steps before it ran.

A step that decodes reads the model's weights once, and the KV entries of every token of context; a prompt's
token costs two operations for each weight. So with W bytes of weights, k bytes of KV per token, B bytes/s and
O operations/s::

    a = W / B      d2 = k / B      m = 2 W / bytes of a weight / O      d1 = m      F = a / 2

(Pope et al., Efficiently scaling transformer inference, 2022, section 2). A token of an answer is computed as
one of a prompt is; that it costs less while memory is the bottleneck is learnt. B of a GPU is what its driver
says: bus width x memory clock, twice per clock. O is not told; it is taken as ``OPERATIONS_PER_BYTE`` x B.
All of it is a prior within a factor of three: half a minute of serving replaces it.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from dynaplan.engines.model_memory import MemoryNeed
from dynaplan.engines.timing_model.learnt_timing import StepLine

OPERATIONS_PER_BYTE = {True: 200.0, False: 5.0}
"""Operations per byte of bandwidth that an engine reaches with prompts, with a GPU and without: half of the
data sheets' figures (H100 SXM: 989 TFLOPS in 16 bit over 3.35 TB/s)."""

BYTES_PER_WEIGHT = 1.0
"""Bytes of one weight, between 0.5 (4 bit) and 2 (16 bit)."""

UNKNOWN_MODEL = MemoryNeed(weights_bytes=8e9, token_bytes=131_072, context_tokens=0)
"""Of a size that nobody told. A prior that is too large is left sooner than one that is too small."""

CPU_BYTES_PER_S = 2e10
"""Two channels of DDR4 reach this."""

GPU_BYTES_PER_S = 1e12
"""A GPU whose driver does not tell its memory: between an L40S and an A100."""


@dataclass(frozen=True)
class Machine:
    """What computes the steps: its name, and the bytes/s at which it reads its memory."""

    name: str
    bytes_per_s: float
    has_gpu: bool


def find_machine(gpus: float) -> Machine:
    """Return the first GPU where a worker has one and the driver knows it, else the processor."""
    found = _gpu() if gpus > 0 else None
    return found or Machine(_processor(), CPU_BYTES_PER_S, has_gpu=False)


def prior_line(need: MemoryNeed | None, machine: Machine, gpus: float) -> StepLine:
    """Return the step times that are expected of a model on a machine, by its size; None: a usual model.

    The GPUs of a worker share its weights.
    """
    if need is None or need.weights_bytes <= 0:
        need = UNKNOWN_MODEL
    bytes_per_ms = machine.bytes_per_s / 1000 * max(1.0, gpus)
    step_ms = need.weights_bytes / bytes_per_ms
    operations_per_ms = OPERATIONS_PER_BYTE[machine.has_gpu] * bytes_per_ms
    prompt_token_ms = 2 * need.weights_bytes / BYTES_PER_WEIGHT / operations_per_ms
    kv_token_ms = need.token_bytes / bytes_per_ms
    return StepLine(step_ms, prompt_token_ms, kv_token_ms, prompt_token_ms, step_ms / 2)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()} x {len(os.sched_getaffinity(0))}"


def _gpu() -> Machine | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = str(pynvml.nvmlDeviceGetName(handle))
        bits = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
        mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        return Machine(name, 2 * mhz * 1e6 * bits / 8, has_gpu=True)
    except pynvml.NVMLError:
        return Machine("a GPU", GPU_BYTES_PER_S, has_gpu=True)
    finally:
        pynvml.nvmlShutdown()
