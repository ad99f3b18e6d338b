"""Parallel sizes: the number of GPUs that an engine spreads over, by the options of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.config.command_words import effective_options
from dynaplan.util.errors import ConfigError

TENSOR = ("tensor-parallel-size", "tp-size")
PIPELINE = ("pipeline-parallel-size", "pp-size")
DATA = ("data-parallel-size", "dp-size")
"""The names of each parallel size: dynaplan's, then SGLang's."""

SHARED_RANKS = "enable-dp-attention"
"""SGLang's option with which the ranks of the tensor parallel group are the data parallel ranks too."""

Options = Mapping[str, Any]


def parallel_size(options: Options, names: tuple[str, ...]) -> int:
    """Return one size, under any of its names; 0 when it is not set. ConfigError when two names differ."""
    options = effective_options(options)
    given = [name for name in names if options.get(name) is not None]
    sizes = {name: options[name] for name in given}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name} is {size!r}", hint="Expected a whole number, at least 1.")
    if len(set(sizes.values())) > 1:
        words = " and ".join(f"{name} is {size}" for name, size in sizes.items())
        raise ConfigError(words, hint="They are two names of the same option: keep one.")
    return sizes[given[0]] if given else 0


def tensor_parallel_size(options: Options, gpus: float) -> int:
    """Return the number of GPUs that each layer is split over: from an option, or else from ``gpus``.

    Raises ConfigError unless ``gpus`` (``resources.gpu``, 0 for a worker without GPUs) is the product of the
    tensor, pipeline and data parallel sizes.
    """
    size, others = parallel_size(options, TENSOR), _others(options)
    whole = max(1, int(gpus))
    if not gpus:
        return max(1, size)
    if not size:
        if whole % others:
            raise ConfigError(
                f"resources.gpu is {gpus:g}, {_words(options, PIPELINE, DATA)}",
                hint=f"Expected the first to be a multiple of {others}.",
            )
        return whole // others
    if size * others != whole:
        raise ConfigError(
            f"{_words(options, TENSOR, PIPELINE, DATA)} needs {size * others} GPUs, "
            f"but resources.gpu is {gpus:g}",
            hint=f"Leave {_name(options, TENSOR)} out: it follows from ServiceArgs.resources.gpu.",
        )
    return size


def gpus_needed(options: Options, usual: float) -> float:
    """Return the GPUs of a worker that states none: ``usual``, unless its parallel sizes need more."""
    size, others = parallel_size(options, TENSOR), _others(options)
    if not size and (others == 1 or (usual >= others and usual % others == 0)):
        return usual
    ranks = max(1, size) * others
    return ranks if ranks > 1 or usual > 1 else usual


def data_parallel_size(options: Options) -> int:
    """Return the number of copies of the model that have GPUs of their own; at least 1."""
    return 1 if options.get(SHARED_RANKS) else max(1, parallel_size(options, DATA))


def _others(options: Options) -> int:
    return max(1, parallel_size(options, PIPELINE)) * data_parallel_size(options)


def _words(options: Options, *kinds: tuple[str, ...]) -> str:
    """Format the sizes that are set, as the user wrote them."""
    names = [_name(options, kind) for kind in kinds]
    return " times ".join(f"{name} {options[name]}" for name in names if name)


def _name(options: Options, names: tuple[str, ...]) -> str:
    return next((name for name in names if options.get(name) is not None), "")
