"""A kube-apiserver out of Debian's sources: ``python -m tests.k8s.environment DIRECTORY`` leaves it there.

Debian 12 has the sources of Kubernetes 1.20.2 and no package with the server. What cannot be built is no
failure: the reason is written down, and the tests are skipped with it. It takes 3 to 10 minutes on 2 cores,
once. Two traps: with the vendored ``reflect2`` 1.0.1 the server dies at the first CRD (Go 1.18 and later), so
Debian's 1.0.2 takes its place; and without rsync ``make`` fails with "Permission denied" of an empty name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.debian import apt, run

REASON_FILE = "not-built.txt"
"""In the directory: why there is no server in it."""

BINARY = "kube-apiserver"
GO = Path("/usr/lib/go-1.19/bin")
REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
PACKAGES = {
    GO / "go": "golang-1.19-go",
    Path("/usr/bin/rsync"): "rsync",
    REFLECT2: "golang-github-modern-go-reflect2-dev",
    Path("/usr/bin/dpkg-source"): "dpkg-dev",
    Path("/usr/bin/make"): "make",
}
"""What has to be there -> the package of Debian 12 that has it."""


def make(directory: Path) -> None:
    """Build the server unless it is there; a second call after a failure tries again."""
    directory.mkdir(parents=True, exist_ok=True)
    reason = directory / REASON_FILE
    if (directory / BINARY).exists():
        return
    if missing := [package for path, package in PACKAGES.items() if not path.exists()]:
        reason.write_text(f"needs, on Debian 12: apt-get install {' '.join(missing)}")
        print(f"kube-apiserver is not built, its tests will be skipped: {reason.read_text()}")
        return
    reason.write_text("the build was interrupted")
    try:
        _build(_unpacked(directory / "source"), directory)
    except subprocess.CalledProcessError as error:
        reason.write_text((error.stderr or str(error))[-2000:])
        print(f"kube-apiserver is not built, its tests will be skipped: {reason.read_text()}")
    else:
        reason.unlink()
        shutil.rmtree(directory / "source")


def _unpacked(place: Path) -> Path:
    """Fetch Debian's sources with lists of their own, and unpack them."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    run([*apt(place, "deb-src"), "source", "--download-only", "kubernetes"], place)
    (description,) = place.glob("kubernetes_*.dsc")
    run(["dpkg-source", "--no-check", "-x", description.name, "tree"], place)
    return place / "tree"


def _build(tree: Path, directory: Path) -> None:
    vendored = tree / "vendor" / "github.com" / "modern-go" / "reflect2"
    for pattern in ("*.go", "*.s"):
        for old in vendored.glob(pattern):
            old.unlink()
        for new in REFLECT2.glob(pattern):
            shutil.copy(new, vendored)
    environment = {
        **os.environ,
        "PATH": f"{GO}:{os.environ['PATH']}",
        "GOFLAGS": "-mod=vendor",
        "GOCACHE": str(directory / "source" / "cache"),
        "GOPATH": str(directory / "source" / "go"),
    }
    run(["make", "WHAT=cmd/kube-apiserver"], tree, environment)
    built = next((tree / "_output" / "local" / "bin").rglob(BINARY))
    shutil.copy(built, directory / BINARY)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
