"""The GPUs of this box, through NVML, or simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.rules.allocation import visible_gpus
from dynaplan.util.errors import CapacityError, ConfigError

DEFAULT_SIMULATED = 8
SIMULATED_UUID = "GPU-SIM-"

SIMULATED_BYTES = 80 * 2**30
"""The memory of a simulated GPU in bytes: an H100's."""


def inventory(
    gpus_option: int | None,
    environ: Mapping[str, str],
    read: Callable[[], tuple[Gpu, ...]] | None = None,
    busy: Callable[[Sequence[Gpu]], Collection[int]] = lambda _: (),
) -> tuple[tuple[Gpu, ...], bool]:
    """Return the GPUs that a deployment may use, and whether they are simulated.

    On a box with GPUs: the ones that ``CUDA_VISIBLE_DEVICES`` of ``environ`` lets us see, the first
    ``gpus_option`` of them unless None, free ones before ``busy`` ones; a greater option raises
    CapacityError. On a box without:
    ``gpus_option`` simulated ones, 8 by default. ``read`` reads the real ones, from NVML unless in tests.
    """
    if gpus_option is not None and gpus_option < 0:
        raise ConfigError(f"--gpus is {gpus_option}", hint="Expected 0 or more.")
    real = (read or nvml)()
    if not real:
        return simulated(DEFAULT_SIMULATED if gpus_option is None else gpus_option), True
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    visible = visible_gpus(real, mask)
    if gpus_option is None:
        return visible, False
    if gpus_option > len(visible):
        masked = "" if mask is None else f", CUDA_VISIBLE_DEVICES={mask!r} shows {len(visible)} of them"
        raise CapacityError(
            f"--gpus is {gpus_option}, but this box has {len(real)} GPUs{masked}",
            hint=f"Expected at most {len(visible)}; leave --gpus out to use all of them.",
        )
    in_use = busy(visible) if gpus_option < len(visible) else ()
    chosen = sorted(visible, key=lambda gpu: gpu.index in in_use)[:gpus_option]
    return tuple(gpu for gpu in visible if gpu in chosen), False


def simulated(number: int) -> tuple[Gpu, ...]:
    """Return that many simulated GPUs: ``GPU-SIM-0``, ``GPU-SIM-1`` ..."""
    uuids = (f"{SIMULATED_UUID}{index}" for index in range(number))
    return tuple(Gpu(index, uuid, "simulated", SIMULATED_BYTES) for index, uuid in enumerate(uuids))


def nvml() -> tuple[Gpu, ...]:
    """Every GPU of the box in PCI bus order, a GPU in MIG mode as its slices; none without a driver.

    ``index`` counts the entries, so on a box without MIG it is NVML's index. NVML ignores
    ``CUDA_VISIBLE_DEVICES``.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        handles = [slice_ for device in devices for slice_ in _slices(pynvml, device)]
        return tuple(_gpu(pynvml, index, handle) for index, handle in enumerate(handles))
    finally:
        pynvml.nvmlShutdown()


def driver() -> tuple[str, str]:
    """Return the version of the NVIDIA driver, and why there is none; one of them is empty."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "", str(error)
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion()), ""
    finally:
        pynvml.nvmlShutdown()


def _slices(pynvml: Any, device: Any) -> Iterator[Any]:
    """The device itself, or its MIG slices when it is in MIG mode: then it cannot be used as a whole."""
    try:
        is_mig = pynvml.nvmlDeviceGetMigMode(device)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        is_mig = False
    if not is_mig:
        yield device
        return
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, position)
        except pynvml.NVMLError_NotFound:
            continue


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(index, _text(uuid), _text(name), _memory_bytes(pynvml, handle))


def _memory_bytes(pynvml: Any, handle: Any) -> int:
    """Return a GPU's memory in bytes.

    0 where it has none of its own (GPUs that share the machine's memory do not tell).
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
