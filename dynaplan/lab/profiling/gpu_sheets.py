"""Data sheets of GPUs: memory, bandwidth, dense operations per second, and the links between them.

Sources: NVIDIA's data sheets of each product (A100 2022, H100 2023, H200 2024, HGX B200 2025, L4, L40S, A10)
and the Ada architecture white paper (RTX 4090: with FP32 accumulation). Numbers "with sparsity" are halved.
Memory is the total that the driver states (``nvidia-smi``). A link is one direction of NVLink, or of PCIe
where GPUs have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.util.errors import ConfigError, nearest

_MIB, _TERA = 2**20, 1e12


@dataclass(frozen=True)
class GpuSheet:
    """One GPU. ``fp8_flops`` is 0 where it has no such units; flops are dense, per second."""

    memory_bytes: float
    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    link_bytes_per_s: float

    def flops(self, bits: int) -> float:
        """Return operations per second on numbers of that many bits: 8, or 16 for all others."""
        return self.fp8_flops if bits == 8 and self.fp8_flops else self.bf16_flops


def _sheet(memory_mib: int, tb_per_s: float, bf16: float, fp8: float, link_gb_per_s: float) -> GpuSheet:
    return GpuSheet(memory_mib * _MIB, tb_per_s * _TERA, bf16 * _TERA, fp8 * _TERA, link_gb_per_s * 1e9)


GPU_SHEETS: Mapping[str, GpuSheet] = {
    "a10": _sheet(23_028, 0.600, 125, 0, 32),
    "a100_pcie": _sheet(81_920, 1.935, 312, 0, 32),
    "a100_sxm": _sheet(81_920, 2.039, 312, 0, 300),
    "a100_sxm_40gb": _sheet(40_960, 1.555, 312, 0, 300),
    "b200_sxm": _sheet(183_359, 8.0, 2250, 4500, 900),
    "h100_nvl": _sheet(95_830, 3.9, 835, 1670, 300),
    "h100_pcie": _sheet(81_559, 2.0, 756, 1513, 64),
    "h100_sxm": _sheet(81_559, 3.35, 989, 1979, 450),
    "h20_sxm": _sheet(97_871, 4.0, 148, 296, 450),
    "h200_sxm": _sheet(143_771, 4.8, 989, 1979, 450),
    "l4": _sheet(23_034, 0.300, 121, 242, 32),
    "l40s": _sheet(46_068, 0.864, 362, 733, 32),
    "rtx_4090": _sheet(24_564, 1.008, 165, 330, 32),
}
"""GPUs by the names that ``--gpu-type`` takes, those of Dynamo's profiler where it has one."""

_DRIVER_NAMES = (
    ("a100-sxm4-40gb", "a100_sxm_40gb"),
    ("a100-sxm", "a100_sxm"),
    ("a100 80gb pcie", "a100_pcie"),
    ("h100 nvl", "h100_nvl"),
    ("h100 pcie", "h100_pcie"),
    ("h100 80gb hbm3", "h100_sxm"),
    ("h200", "h200_sxm"),
    ("h20", "h20_sxm"),
    ("b200", "b200_sxm"),
    ("l40s", "l40s"),
    ("l4", "l4"),
    ("a10", "a10"),
    ("rtx 4090", "rtx_4090"),
)
"""Parts of the names that the driver gives, and ours; more specific ones first."""


def gpu_sheet(name: str) -> GpuSheet:
    """Return the data sheet of that GPU; raises ConfigError, naming the nearest, when it is not known."""
    if name not in GPU_SHEETS:
        raise ConfigError(
            f"--gpu-type is '{name}', which has no data sheet here", hint=nearest(name, GPU_SHEETS)
        )
    return GPU_SHEETS[name]


def name_of(driver_name: str) -> str:
    """Return our name of a GPU by the driver's, such as ``NVIDIA H100 80GB HBM3``; empty when not known."""
    words = driver_name.lower().removeprefix("nvidia ")
    return next((ours for part, ours in _DRIVER_NAMES if words.startswith(part) or f" {part}" in words), "")
