"""The step timings of the simulated engine: measured profiles (shipped, or the user's files) and polynomials.

A profile is JSON, or a directory of Dynamo's profiler. Its later versions write one archive for each half.
The first one (``dynamo serve``, Dynamo 0.2 and 0.3) wrote, for the tensor parallel sizes that it chose (its
last one, ``m``, in the name of the archive)::

    decode_tp{n}_interpolation/decode_tp{m}_data.npz    x_kv_usage, y_context_length, z_itl[, z_thpt_per_gpu]
    prefill_tp{n}_interpolation/gap_isl{tokens}/        the results of genai-perf for one prompt length

Nothing there holds the prefill curve but genai-perf's own results, and nothing the size of the KV cache. That
one follows from the points. The profiler took ``x_kv_usage = y_context_length * requests / max_kv_tokens``,
and its sweep of every context began with one request, so that

    max_kv_tokens = max(y_context_length / x_kv_usage)
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.timing_model.step_timing import (
    DECODE_KEYS,
    FITTED,
    MOCKER_KV_BLOCKS,
    PREFILL_KEYS,
    MeasuredProfile,
    StepTiming,
    mocker_timing,
)
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import ConfigError

SHIPPED_DIR = Path(__file__).parents[2] / "data" / "profiles"


def known_profiles() -> list[str]:
    """The names that ``profile:`` takes beside paths."""
    return sorted([*(path.stem for path in SHIPPED_DIR.glob("*.json")), "mocker", *FITTED])


def timing_for(options: SimOptions) -> tuple[StepTiming, int]:
    """The timing that the options ask for, and the KV tokens of one worker with it; raises ConfigError."""
    name = options.profile_name
    if name == "mocker":
        kv_tokens = (options.total_blocks or MOCKER_KV_BLOCKS) * options.block_tokens
        return mocker_timing(kv_tokens), kv_tokens
    if name in FITTED:
        return FITTED[name].timing(), FITTED[name].max_kv_tokens
    profile = load_profile(name, options.tensor_parallel_size)
    return profile.timing(), profile.max_kv_tokens


def profile_origin(options: SimOptions) -> str:
    """Return where an estimated profile's times are from, in words; empty for a measured one, or a formula.

    Raises ConfigError for a profile that is not there.
    """
    name = options.profile_name
    formula = name == "mocker" or name in FITTED
    return "" if formula else load_profile(name, options.tensor_parallel_size).origin


def profile_tp_size(options: SimOptions) -> int:
    """Return the tensor parallel size that the times of the options' profile are of.

    1 for a polynomial; for a shipped file the size in its name, or 1; for a shipped profile with a file per
    size, and for a user's own, the size that is asked for.
    """
    name = options.profile_name
    if name == "mocker" or name in FITTED:
        return 1
    if "/" in name or not (SHIPPED_DIR / f"{name}.json").is_file():
        return options.tensor_parallel_size
    _, _, size = name.rpartition("-tp")
    return int(size) if size.isdecimal() else 1


def load_profile(name: str, tensor_parallel_size: int = 1) -> MeasuredProfile:
    """A measured profile: a shipped one by name, or a JSON file or directory by path; raises ConfigError.

    A shipped profile with one file per tensor parallel size is found by its common name too. A directory
    holds the files of Dynamo's profiler: ``selected_{prefill,decode}_interpolation/raw_data.npz``,
    ``{prefill,decode}_raw_data.json``, the pre-swept ``{prefill,decode}.npz`` (their first configuration with
    that tensor parallel size), or the first version's ``{prefill,decode}_tp{n}_interpolation``.
    """
    for stem in (name, f"{name}-tp{tensor_parallel_size}"):
        if "/" not in name and (SHIPPED_DIR / f"{stem}.json").is_file():
            return MeasuredProfile.from_document(_read_json(SHIPPED_DIR / f"{stem}.json"), name)
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return MeasuredProfile.from_document(_read_json(path), name)
    if path.is_dir():
        return MeasuredProfile.from_document(_read_directory(path, tensor_parallel_size), name)
    raise ConfigError(
        f"profile is '{name}' (tensor-parallel-size {tensor_parallel_size}), which does not exist",
        hint=f"Expected a path, or one of: {', '.join(known_profiles())}.",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"profile '{path}' cannot be read: {error}", hint="Expected a JSON file with the profiler's keys."
        ) from error


def _read_directory(directory: Path, tensor_parallel_size: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for part, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        archives = (directory / f"selected_{part}_interpolation" / "raw_data.npz", directory / f"{part}.npz")
        archive = next((path for path in archives if path.is_file()), None)
        if archive is not None:
            document |= _read_npz(archive, keys, tensor_parallel_size)
        elif (directory / f"{part}_raw_data.json").is_file():
            document |= _read_json(directory / f"{part}_raw_data.json")
        elif early := first_version_part(directory, part, tensor_parallel_size):
            document |= early
        else:
            raise ConfigError(
                f"profile '{directory}' holds no {part} measurements",
                hint=f"Expected selected_{part}_interpolation/raw_data.npz or {part}_raw_data.json in it.",
            )
    return document


def _read_npz(path: Path, keys: tuple[str, ...], tensor_parallel_size: int) -> dict[str, Any]:
    import numpy  # only for archives: it costs 30 MiB and 0.1 s

    try:
        with path.open("rb") as file, numpy.load(file) as archive:
            row = 0
            if "tp" in archive.files:
                sizes = archive["tp"].reshape(-1).tolist()
                if tensor_parallel_size not in sizes:
                    raise ConfigError(
                        f"tensor-parallel-size is {tensor_parallel_size}, not measured in '{path}'",
                        hint=f"Expected one of: {', '.join(map(str, sizes))}.",
                    )
                row = sizes.index(tensor_parallel_size)
            document = {key: archive[key][row] if archive[key].ndim == 2 else archive[key] for key in keys}
            if "origin" in archive.files:
                document["origin"] = str(archive["origin"].reshape(-1)[0])
        if "max_kv_tokens" in document:
            document["max_kv_tokens"] = int(document["max_kv_tokens"].reshape(-1)[0])
    except UNREADABLE_ARCHIVE as error:
        raise ConfigError(
            f"profile '{path}' cannot be read: {error}", hint=f"Expected the arrays {', '.join(keys)}."
        ) from error
    return document


UNREADABLE_ARCHIVE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RecursionError, SyntaxError, MemoryError),
)
"""The exceptions of numpy and zipfile for archives that are damaged, and of what is computed from them."""

GENAI_PERF_RESULT = "profile_export_genai_perf.json"


def first_version_part(directory: Path, part: str, tensor_parallel_size: int) -> dict[str, Any] | None:
    """Read the ``prefill`` or ``decode`` part of a directory that the first version of the profiler wrote.

    Returns it with the keys of a measured profile; None when there is none.

    Raises ConfigError when it is there, but for other tensor parallel sizes only, or cannot be read.
    """
    by_size = {
        int(found[1]): path
        for path in sorted(directory.glob(f"{part}_tp*_interpolation"))
        if (found := re.fullmatch(rf"{part}_tp(\d+)_interpolation", path.name))
    }
    if not by_size:
        return None
    if tensor_parallel_size not in by_size and len(by_size) > 1:
        raise ConfigError(
            f"tensor-parallel-size is {tensor_parallel_size}, not measured in '{directory}'",
            hint=f"Expected one of: {', '.join(map(str, sorted(by_size)))}.",
        )
    size = tensor_parallel_size if tensor_parallel_size in by_size else min(by_size)
    read = _first_version_prefill if part == "prefill" else _first_version_decode
    try:
        return read(by_size[size], size)
    except UNREADABLE_ARCHIVE as error:
        raise ConfigError(
            f"profile '{by_size[size]}' cannot be read: {error!r}",
            hint="Expected the files of the first version of Dynamo's profiler.",
        ) from error


def _first_version_decode(directory: Path, tensor_parallel_size: int) -> dict[str, Any]:
    arrays = _first_version_arrays(directory)
    usages, contexts, itls_ms = (arrays[key] for key in ("x_kv_usage", "y_context_length", "z_itl"))
    by_point = list(zip(usages, contexts, itls_ms, strict=True))
    kv_tokens = round(max(context / usage for usage, context, _ in by_point))
    tokens_per_s_per_gpu = [
        usage * kv_tokens / context / itl_ms * 1000 / tensor_parallel_size
        for usage, context, itl_ms in by_point
    ]
    return {"z_thpt_per_gpu": tokens_per_s_per_gpu, "max_kv_tokens": kv_tokens, **arrays}


def _first_version_prefill(directory: Path, tensor_parallel_size: int) -> dict[str, Any]:
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


def _first_version_arrays(directory: Path) -> dict[str, list[float]]:
    import numpy  # only for archives: it costs 30 MiB and 0.1 s

    archives = sorted(directory.glob("*_data.npz"))
    if not archives:
        raise ValueError("no *_data.npz")
    with archives[0].open("rb") as file, numpy.load(file) as archive:
        return {key: archive[key].reshape(-1).tolist() for key in archive.files}


def check_times_known(options: SimOptions) -> None:
    """Raise ConfigError for a model of which the profile that is chosen for it has no times."""
    size, name = options.tensor_parallel_size, options.profile_name
    if options.profile or name in known_profiles():
        return
    sizes = [each.rpartition("-tp")[2] for each in known_profiles() if each.startswith(f"{name}-tp")]
    if str(size) not in sizes:
        raise ConfigError(
            f"no engine is named, so {options.model} is simulated, and of a model of that size with "
            f"tensor-parallel-size {size} no times are known",
            hint="Write engine: vllm here and in the other workers' sections to serve the model itself. To "
            f"simulate it: a tensor-parallel-size of {', '.join(sizes)}, or profile: h200-bf16, a formula.",
        )
