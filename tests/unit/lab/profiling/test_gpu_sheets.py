"""GPUs by our names and by the driver's."""

from __future__ import annotations

import pytest

from dynaplan.lab.profiling.gpu_sheets import GPU_SHEETS, gpu_sheet, name_of
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H20", "h20_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("simulated", ""),
    ],
)
def test_a_gpu_is_known_by_the_name_that_the_driver_gives(driver_name: str, name: str) -> None:
    assert name_of(driver_name) == name


def test_every_gpu_with_a_data_sheet_has_one_name() -> None:
    assert gpu_sheet("h100_sxm") is GPU_SHEETS["h100_sxm"]
    with pytest.raises(ConfigError, match="'h100_smx'") as caught:
        gpu_sheet("h100_smx")
    assert caught.value.hint == "Did you mean 'h100_sxm'?"


def test_numbers_of_eight_bits_are_as_fast_as_others_where_there_are_no_units_for_them() -> None:
    assert GPU_SHEETS["h100_sxm"].flops(8) == 1979e12
    assert GPU_SHEETS["a100_sxm"].flops(8) == GPU_SHEETS["a100_sxm"].flops(16) == 312e12
    assert GPU_SHEETS["h100_sxm"].flops(4) == GPU_SHEETS["h100_sxm"].flops(16)
