"""Debian 12's sources and packages, without installing any: ``python -m tests.debian prometheus DIRECTORY``.

That leaves the package's binary in the directory. One that cannot be had is no failure: the tests that need
it are skipped, and the reason is printed. apt is given lists of its own; the system's stay as they are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ARCHIVE = "http://deb.debian.org/debian bookworm main"


def apt(place: Path, kind: str) -> list[str]:
    """Fetch the lists of "deb" or "deb-src"; return the command of an apt-get that reads them."""
    (place / "lists" / "partial").mkdir(parents=True)
    (place / "sources.list").write_text(f"{kind} {ARCHIVE}\n")
    command = [
        *("apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={place / 'sources.list'}"),
        *("-o", "Dir::Etc::sourceparts=/dev/null", "-o", f"Dir::State::lists={place / 'lists'}"),
        *("-o", f"Dir::Cache::pkgcache={place / 'packages.bin'}"),
        *("-o", f"Dir::Cache::srcpkgcache={place / 'sources.bin'}", "-o", "APT::Sandbox::User=root"),
    ]
    run([*command, "update"], place)
    return command


def run(command: list[str], place: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command there; raises CalledProcessError, with what it said, when it fails."""
    subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, text=True)


def fetch_binary(package: str, directory: Path) -> None:
    """Leave ``/usr/bin/PACKAGE`` of that package in the directory, unless it is there."""
    if (directory / package).exists():
        return
    place = directory / "fetched"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        run([*apt(place, "deb"), "download", package], place)
        (archive,) = place.glob(f"{package}_*.deb")
        run(["dpkg-deb", "-x", archive.name, "tree"], place)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{package} is not fetched, its tests will be skipped: {getattr(error, 'stderr', '') or error}")
    else:
        shutil.copy(place / "tree" / "usr" / "bin" / package, directory / package)
    shutil.rmtree(place)


if __name__ == "__main__":
    fetch_binary(sys.argv[1], Path(sys.argv[2]))
