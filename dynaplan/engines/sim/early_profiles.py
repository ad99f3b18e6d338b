"""Reads what the first version of Dynamo's profiler left (``dynamo serve``, Dynamo 0.2 and 0.3).

Later versions write one archive for each half. The first one wrote, for the tensor parallel sizes that it
chose (its last one, ``m``, in the name of the archive)::

    decode_tp{n}_interpolation/decode_tp{m}_data.npz    x_kv_usage, y_context_length, z_itl[, z_thpt_per_gpu]
    prefill_tp{n}_interpolation/gap_isl{tokens}/        the results of genai-perf for one prompt length

Nothing holds the prefill curve but genai-perf's own results, and nothing the size of the KV cache. That one
follows from the points. The profiler took ``x_kv_usage = y_context_length * requests / max_kv_tokens``, and
its sweep of every context began with one request, so that

    max_kv_tokens = max(y_context_length / x_kv_usage)
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from dynaplan.util.errors import ConfigError

UNREADABLE_ARCHIVE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RecursionError, SyntaxError, MemoryError),
)
"""The exceptions of numpy and zipfile for archives that are damaged, and of what is computed from them."""

GENAI_PERF_RESULT = "profile_export_genai_perf.json"


def early_half(directory: Path, half: str, tensor_parallel_size: int) -> dict[str, Any] | None:
    """One half, ``prefill`` or ``decode``, with the keys of a measured profile; None when it is not there.

    Raises ConfigError when it is there, but for other tensor parallel sizes only, or cannot be read.
    """
    by_size = {
        int(found[1]): path
        for path in sorted(directory.glob(f"{half}_tp*_interpolation"))
        if (found := re.fullmatch(rf"{half}_tp(\d+)_interpolation", path.name))
    }
    if not by_size:
        return None
    if tensor_parallel_size not in by_size and len(by_size) > 1:
        raise ConfigError(
            f"tensor-parallel-size is {tensor_parallel_size}, not measured in '{directory}'",
            hint=f"Expected one of: {', '.join(map(str, sorted(by_size)))}.",
        )
    size = tensor_parallel_size if tensor_parallel_size in by_size else min(by_size)
    read = _prefill if half == "prefill" else _decode
    try:
        return read(by_size[size], size)
    except UNREADABLE_ARCHIVE as error:
        raise ConfigError(
            f"profile '{by_size[size]}' cannot be read: {error!r}",
            hint="Expected the files of the first version of Dynamo's profiler.",
        ) from error


def _decode(directory: Path, tensor_parallel_size: int) -> dict[str, Any]:
    arrays = _arrays(directory)
    usages, contexts, itls_ms = (arrays[key] for key in ("x_kv_usage", "y_context_length", "z_itl"))
    by_point = list(zip(usages, contexts, itls_ms, strict=True))
    kv_tokens = round(max(context / usage for usage, context, _ in by_point))
    tokens_per_s_per_gpu = [
        usage * kv_tokens / context / itl_ms * 1000 / tensor_parallel_size
        for usage, context, itl_ms in by_point
    ]
    return {"z_thpt_per_gpu": tokens_per_s_per_gpu, "max_kv_tokens": kv_tokens, **arrays}


def _prefill(directory: Path, tensor_parallel_size: int) -> dict[str, Any]:
    lengths, ttfts_ms = [], []
    for result in directory.glob(f"gap_isl*/**/{GENAI_PERF_RESULT}"):
        folder = result.relative_to(directory).parts[0]
        lengths.append(float(folder.removeprefix("gap_isl")))
        ttfts_ms.append(float(json.loads(result.read_text())["time_to_first_token"]["avg"]))
    points = sorted(zip(lengths, ttfts_ms, strict=True))
    if not points:
        raise ValueError(f"no gap_isl*/**/{GENAI_PERF_RESULT}")
    return {
        "prefill_isl": [isl for isl, _ in points],
        "prefill_ttft": [ttft_ms for _, ttft_ms in points],
        "prefill_thpt_per_gpu": [isl / ttft_ms * 1000 / tensor_parallel_size for isl, ttft_ms in points],
    }


def _arrays(directory: Path) -> dict[str, list[float]]:
    """The arrays of the directory's archive."""
    import numpy  # only for archives: it costs 30 MiB and 0.1 s

    archives = sorted(directory.glob("*_data.npz"))
    if not archives:
        raise ValueError("no *_data.npz")
    with archives[0].open("rb") as file, numpy.load(file) as archive:
        return {key: archive[key].reshape(-1).tolist() for key in archive.files}
