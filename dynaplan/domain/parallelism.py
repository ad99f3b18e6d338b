"""Over how many GPUs an engine spreads itself, by the options of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.domain.errors import ConfigError

TENSOR = ("tensor-parallel-size", "tp-size")
PIPELINE = ("pipeline-parallel-size", "pp-size")
DATA = ("data-parallel-size", "dp-size")

SHARED_RANKS = "enable-dp-attention"
"""SGLang's: with it the data parallel ranks are those of the tensor parallel group, not further ones."""

Options = Mapping[str, Any]


def parallel_size(options: Options, names: tuple[str, ...]) -> int:
    """One size, under whichever of its names; 0 when it is not set. ConfigError when two of them differ."""
    given = [name for name in names if options.get(name) is not None]
    sizes = {name: options[name] for name in given}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name} is {size!r}", hint="expected a whole number, at least 1")
    if len(set(sizes.values())) > 1:
        words = " and ".join(f"{name} is {size}" for name, size in sizes.items())
        raise ConfigError(words, hint="they are two names of the same: keep one")
    return sizes[given[0]] if given else 0


def tensor_parallel_size(options: Options, gpus: float) -> int:
    """Over how many GPUs each layer is split: what an option says, else what follows from ``gpus``.

    Raises ConfigError unless ``gpus`` (``resources.gpu``; 0 is a worker without) are tensor times pipeline
    times data parallel size.
    """
    size, others = parallel_size(options, TENSOR), _others(options)
    whole = max(1, int(gpus))
    if not gpus:
        return max(1, size)
    if not size:
        if whole % others:
            raise ConfigError(
                f"resources.gpu is {gpus:g}, {_words(options, PIPELINE, DATA)}",
                hint=f"expected the first to be a multiple of {others}",
            )
        return whole // others
    if size * others != whole:
        raise ConfigError(
            f"{_words(options, TENSOR, PIPELINE, DATA)} needs {size * others} GPUs, "
            f"but resources.gpu is {gpus:g}",
            hint=f"leave {_name(options, TENSOR)} out: it follows from ServiceArgs.resources.gpu",
        )
    return size


def gpus_needed(options: Options, usual: float) -> float:
    """The GPUs of a worker that does not say how many: ``usual``, unless its parallel sizes need others."""
    size, others = parallel_size(options, TENSOR), _others(options)
    if not size and (others == 1 or (usual >= others and usual % others == 0)):
        return usual
    ranks = max(1, size) * others
    return ranks if ranks > 1 or usual > 1 else usual


def data_parallel_size(options: Options) -> int:
    """How many copies of the model an engine has on GPUs of their own; at least 1."""
    return 1 if options.get(SHARED_RANKS) else max(1, parallel_size(options, DATA))


def _others(options: Options) -> int:
    return max(1, parallel_size(options, PIPELINE)) * data_parallel_size(options)


def _words(options: Options, *kinds: tuple[str, ...]) -> str:
    """The sizes that are set, as the user wrote them."""
    names = [_name(options, kind) for kind in kinds]
    return " times ".join(f"{name} {options[name]}" for name in names if name)


def _name(options: Options, names: tuple[str, ...]) -> str:
    return next((name for name in names if options.get(name) is not None), "")
