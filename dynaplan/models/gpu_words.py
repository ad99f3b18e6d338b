"""The GPUs that a program's owner has chosen for it: read from its words and its environment.

Three kinds of words choose, each among what the one before leaves:

1. What the program may see: ``CUDA_VISIBLE_DEVICES`` in its environment or before the command; of a container
   ``--gpus``, ``--device nvidia.com/gpu=`` or ``-e NVIDIA_VISIBLE_DEVICES``, and within it, counted among
   those, ``-e CUDA_VISIBLE_DEVICES``.
2. Which of those it uses: ``--device CUDA0,CUDA1``, ``--main-gpu`` with ``--split-mode none``, and the parts
   of ``--tensor-split 1,0,1`` that are not 0.
3. How many of those it uses: the parts of ``--tensor-split``, ``--tensor-parallel-size`` and its kin; none
   with ``-ngl 0``.

A flag has its variable's place, too (``LLAMA_ARG_TENSOR_SPLIT``), and comes before it. Where only a number is
said, the GPUs are still ours to choose, unless a mask or a container fixes what the program sees: then it
uses the first of them. A program that says no number uses all that a mask shows it, as llama-server does;
vLLM and SGLang use one.

Sources: CUDA's programming guide on ``CUDA_VISIBLE_DEVICES``, docker's ``run`` reference on ``--gpus``, the
container device interface, llama-server's README, vLLM's and SGLang's arguments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.config.command_words import words_of
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.contract.gpus import Gpu, visible_gpus

MASK = "CUDA_VISIBLE_DEVICES"
CONTAINER_MASK = "NVIDIA_VISIBLE_DEVICES"

_CONTAINER_PROGRAMS = ("docker", "podman", "nerdctl")
_SHELLS = ("sh", "bash", "dash", "zsh")
_USES_ONE_GPU = re.compile(r"(?:^|/)(?:vllm|sglang)(?:$|[/.:-])")
"""Programs and images of engines that use one of the GPUs that they see, unless told a parallel size."""

ALL = "all"

_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("-ts", "--tensor-split"), "tensor-split"),
    **dict.fromkeys(("-mg", "--main-gpu"), "main-gpu"),
    **dict.fromkeys(("-sm", "--split-mode"), "split-mode"),
    **dict.fromkeys(("-dev", "--device"), "device"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "n-gpu-layers"),
    **dict.fromkeys(("-tp", "--tp", "--tp-size", "--tensor-parallel-size"), "tensor-parallel-size"),
    **dict.fromkeys(("-pp", "--pp-size", "--pipeline-parallel-size"), "pipeline-parallel-size"),
    **dict.fromkeys(("-dp", "--dp-size", "--data-parallel-size"), "data-parallel-size"),
}
"""Flags that choose GPUs, by each of their names."""

GPU_OPTIONS = frozenset(_FLAGS.values())
"""The same as options of an engine."""

_RANKS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

_VARIABLES: Mapping[str, str] = {
    f"LLAMA_ARG_{name.replace('-', '_').upper()}": name
    for name in ("tensor-split", "main-gpu", "split-mode", "device", "n-gpu-layers")
}

_ASSIGNMENT = re.compile(r"(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>.*)", re.DOTALL)
_CUDA_DEVICES = re.compile(r"CUDA\d+(?:,CUDA\d+)*")
_DEVICE_INTERFACE = "nvidia.com/gpu="


@dataclass(frozen=True)
class GpuWords:
    """What a program's words choose: ``masks`` as in ``CUDA_VISIBLE_DEVICES``, each within the one before.

    ``positions``, among the visible GPUs, are those that it uses, and ``number`` is how many (``is_at_most``:
    or fewer where it sees fewer); None where that is not said. ``largest_part`` is the part of the model on
    its fullest GPU, 0 where it is spread evenly. ``is_visibility_pinned``: a mask or a container decides what
    it sees, whatever variable its process gets. ``said`` are the words.
    """

    masks: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None
    number: int | None = None
    is_at_most: bool = False
    largest_part: float = 0.0
    is_visibility_pinned: bool = False
    said: str = ""


@dataclass(frozen=True)
class OwnersGpus:
    """The owner's choice on this box.

    ``number`` is how many GPUs a worker has, None where he leaves that open; ``allowed`` are the indices of
    those that it may have, empty for any. ``visible`` are those that its process has to see, in its order,
    where they are more than its own. ``missing`` says that the words name no GPU of the deployment, "" where
    they do.
    """

    number: int | None = None
    allowed: frozenset[int] = frozenset()
    visible: tuple[int, ...] = ()
    largest_part: float = 0.0
    said: str = ""
    missing: str = ""


def owners_gpus(words: Sequence[str], environment: Mapping[str, str], inventory: Sequence[Gpu]) -> OwnersGpus:
    """Return what the owner of a program says of its GPUs, on a box with this inventory."""
    return on_box(read(words, environment), inventory)


ALL_THAT_IT_SEES = 1024
"""More GPUs than a box has."""


def chosen_gpus(
    options: Mapping[str, object], environment: Mapping[str, str], inventory: Sequence[Gpu]
) -> OwnersGpus:
    """Return the GPUs that the owner of a worker has chosen by its options and ``environment``.

    Of simulated GPUs there is nothing to choose.
    """
    real = [gpu for gpu in inventory if not gpu.is_simulated]
    if not real or engine_of(options) == SIMULATED:
        return OwnersGpus()
    command = options.get("command")
    words = words_of(command, "command")
    for name in GPU_OPTIONS & options.keys():
        value = options[name]
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words = [*words, f"--{name}", text]
    return owners_gpus(words, environment, real)


def read(words: Sequence[str], environment: Mapping[str, str]) -> GpuWords:
    """Return what the words of a command and the variables of its owner choose."""
    words = _without_shells(words)
    begin = _container_begin(words)
    outer = {**environment, **_assignments(words[:begin])}
    variables = outer if begin == len(words) else _passed_variables(words[begin:], outer)
    flags, said = _flags(words, variables)
    masks, mask_words = _masks(words[begin:], outer, variables)
    chosen = GpuWords(
        tuple(masks),
        is_visibility_pinned=bool(masks) or begin < len(words),
        said=", ".join(dict.fromkeys([*mask_words, *said])),
    )
    if flags.get("n-gpu-layers") == "0" or flags.get("device") in ("none", "cpu"):
        return replace(chosen, number=0)
    if positions := _positions(flags):
        return replace(chosen, positions=positions, largest_part=_largest_part(flags))
    if parts := _split_parts(flags):
        return replace(chosen, number=len(parts), is_at_most=True, largest_part=_largest_part(flags))
    if "main-gpu" in flags:  # of several: the others have the rest of the layers
        return replace(chosen, number=ALL_THAT_IT_SEES, is_at_most=True)
    number = _number(flags)
    if number is None and chosen.is_visibility_pinned and any(map(_USES_ONE_GPU.search, words)):
        number = 1
    return replace(chosen, number=number)


def on_box(chosen: GpuWords, inventory: Sequence[Gpu]) -> OwnersGpus:
    """Return the choice in indices of the inventory."""
    if chosen.number == 0:
        return OwnersGpus(0, said=chosen.said)
    visible = list(inventory)
    for depth, mask in enumerate(chosen.masks):
        visible = _masked(visible, mask, by_position=depth > 0)
    if chosen.positions is not None:
        used = [visible[each] for each in chosen.positions if each < len(visible)]
        if not used:
            return _nothing(chosen, inventory)
        seen = () if chosen.is_visibility_pinned else tuple(gpu.index for gpu in visible)
        return _these(chosen, used, seen)
    number = chosen.number
    if chosen.is_visibility_pinned and (chosen.masks or number is not None):
        used = visible[:number]
        return _these(chosen, used) if used else _nothing(chosen, inventory)
    if number is not None and chosen.is_at_most:
        number = min(number, len(inventory))
    return OwnersGpus(number, largest_part=chosen.largest_part, said=chosen.said)


def _these(chosen: GpuWords, used: Sequence[Gpu], seen: tuple[int, ...] = ()) -> OwnersGpus:
    allowed = frozenset(gpu.index for gpu in used)
    return OwnersGpus(len(used), allowed, seen, chosen.largest_part, chosen.said)


def _nothing(chosen: GpuWords, inventory: Sequence[Gpu]) -> OwnersGpus:
    """Return the choice of no GPU of the deployment: by a mask of none, or by words that name other ones."""
    if all(mask in ("", "-1", "none", "void") for mask in chosen.masks[-1:]) and chosen.masks:
        return OwnersGpus(0, said=chosen.said)
    there = ", ".join(str(gpu.index) for gpu in inventory)
    missing = f"{chosen.said} names no GPU of this deployment, which has {there or 'none'}"
    return OwnersGpus(0, said=chosen.said, missing=missing)


def _masked(visible: Sequence[Gpu], mask: str, *, by_position: bool) -> list[Gpu]:
    if mask == ALL:
        return list(visible)
    if not by_position:
        return list(visible_gpus(visible, mask))
    numbered = [replace(gpu, index=position) for position, gpu in enumerate(visible)]
    return [visible[gpu.index] for gpu in visible_gpus(numbered, mask)]


# reading the words


def _without_shells(words: Sequence[str]) -> list[str]:
    """Return the words; the script of ``bash -c "..."`` is split into its words."""
    found: list[str] = []
    for position, word in enumerate(words):
        is_script = (
            position >= 2
            and words[position - 1].startswith("-")
            and words[position - 1].endswith("c")
            and words[position - 2].rpartition("/")[2] in _SHELLS
        )
        found += _split(word) if is_script else [word]
    return found


def _split(text: str) -> list[str]:
    try:
        return [word.rstrip(";") for word in shlex.split(text)]
    except ValueError:
        return [text]


def _container_begin(words: Sequence[str]) -> int:
    """Return where the words of a container begin; the number of words where there is none."""
    for position, word in enumerate(words):
        is_next = words[position + 1 : position + 2] in (["run"], ["container"])
        if is_next and word.rpartition("/")[2] in _CONTAINER_PROGRAMS:
            return position
    return len(words)


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that words set, each ``NAME=value`` in capitals, wherever it stands."""
    found = (_ASSIGNMENT.fullmatch(word) for word in words)
    return {each["name"]: each["value"] for each in found if each}


def _passed_variables(words: Sequence[str], outer: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a container is given: ``-e NAME=value``, and ``-e NAME`` as it is outside."""
    found = {}
    for given in _values(words, ("-e", "--env")):
        name, is_there, value = given.partition("=")
        if is_there or name in outer:
            found[name] = value if is_there else outer[name]
    return found


def _values(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the values of a flag that may come several times: ``--name value``, ``--name=value``."""
    found = []
    for position, word in enumerate(words):
        name, is_there, value = word.partition("=")
        if word in names and position + 1 < len(words):
            found.append(words[position + 1])
        elif is_there and name in names and name.startswith("--"):
            found.append(value)
    return found


def _flags(words: Sequence[str], variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of flags that choose GPUs, by the flag's name, and the words that gave them.

    Of a flag that comes twice the last one holds; variables are read as flags.
    """
    found = {name: variables[each] for each, name in _VARIABLES.items() if each in variables}
    said = {name: f"{each}={variables[each]}" for each, name in _VARIABLES.items() if each in variables}
    for flag, name in _FLAGS.items():
        for value in _values(words, (flag,)):
            if name != "device" or _is_engine_device(value):
                found[name], said[name] = value, f"{flag} {value}"
    is_choice = {name for name, value in found.items() if name != "n-gpu-layers" or value == "0"}
    return found, [said[name] for name in said if name in is_choice]


def _is_engine_device(value: str) -> bool:
    """Tell whether a ``--device`` is an engine's (``CUDA0``, ``none``), and not a container's."""
    return value in ("none", "cpu") or _CUDA_DEVICES.fullmatch(value) is not None


def _masks(
    container: Sequence[str], outer: Mapping[str, str], variables: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the masks that hold for the program, the outermost first, and the words for them."""
    if not container:
        return _variable_mask(outer, MASK)
    given = [_of_gpus_flag(each) for each in _values(container, ("--gpus",))]
    said = [f"--gpus {each}" for each in _values(container, ("--gpus",))]
    devices = [each for each in _values(container, ("--device",)) if each.startswith(_DEVICE_INTERFACE)]
    if devices:
        names = [each.removeprefix(_DEVICE_INTERFACE) for each in devices]
        given.append(ALL if ALL in names else ",".join(names))
        said += [f"--device {each}" for each in devices]
    by_variable, variable_words = _variable_mask(variables, CONTAINER_MASK)
    inner, inner_words = _variable_mask(variables, MASK)
    outermost = given or by_variable or ([ALL] if inner else [])
    return [*outermost[-1:], *inner], [*said, *variable_words, *inner_words]


def _variable_mask(variables: Mapping[str, str], name: str) -> tuple[list[str], list[str]]:
    value = variables.get(name)
    if value is None:
        return [], []
    return [value], [f"{name}={value}"]


def _of_gpus_flag(value: str) -> str:
    """Return the mask that docker's ``--gpus`` makes: ``2`` is the first two of the box."""
    text = value.strip("'\"")
    if text.isdecimal():
        return ",".join(map(str, range(int(text))))
    fields = re.match(r"(?:.*,)?\"?device=(?P<devices>[^\"]*)", text)
    if fields is None:
        return ALL
    # "device=0,1" and "device=0,capabilities=utility" have the same form: a field begins at a name.
    return re.split(r",(?=[a-z]+=)", fields["devices"])[0]


def _split_parts(flags: Mapping[str, str]) -> list[float]:
    """Return the parts of ``--tensor-split``, none where it is not given or no list of numbers."""
    try:
        return [float(each) for each in re.split(r"[,/]", flags["tensor-split"])]
    except (KeyError, ValueError):
        return []


def _positions(flags: Mapping[str, str]) -> tuple[int, ...]:
    device = flags.get("device", "")
    if _CUDA_DEVICES.fullmatch(device):
        return tuple(int(each) for each in re.findall(r"\d+", device))
    if flags.get("split-mode") == "none":
        main = flags.get("main-gpu", "")
        return (int(main),) if main.isdecimal() else ()
    parts = _split_parts(flags)
    return tuple(position for position, part in enumerate(parts) if part > 0) if 0 in parts else ()


def _number(flags: Mapping[str, str]) -> int | None:
    if flags.get("split-mode") == "none":
        return 1
    ranks = 1
    for name in _RANKS:
        value = flags.get(name, "")
        ranks *= int(value) if value.isdecimal() and value != "0" else 1
    return ranks if any(name in flags for name in _RANKS) else None


def _largest_part(flags: Mapping[str, str]) -> float:
    parts = _split_parts(flags)
    return max(parts) / sum(parts) if sum(parts) > 0 else 0.0
