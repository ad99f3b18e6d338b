"""Certificates for a test, made by the ``openssl`` command, which must be there."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class CertificateFiles:
    """One certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; ``certificate`` is its own. All of its files are in the directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl to make certificates with")
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.name = name
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
        # Python 3.13 refuses an authority that does not say what its key is for.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._openssl("req", "-x509", *NEW_KEY, *files, "-subj", f"/CN={name}", *usage)

    @property
    def certificate(self) -> Path:
        return self.directory / f"{self.name}.pem"

    def issue(
        self, name: str, extensions: str = "subjectAltName=IP:127.0.0.1", *, subject: str = "", days: int = 2
    ) -> CertificateFiles:
        """Sign a certificate for so many days from now; -1 has ended yesterday. ``extensions`` are lines."""
        (self.directory / f"{name}.cnf").write_text(extensions + "\n")
        self._openssl(
            *("req", *NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr"),
            *("-subj", subject or f"/CN={name}"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", str(days)),
            *("-extfile", f"{name}.cnf", "-CAcreateserial"),
            *("-CA", f"{self.name}.pem", "-CAkey", f"{self.name}.key"),
        )
        return CertificateFiles(self.directory / f"{name}.pem", self.directory / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=self.directory, check=True, capture_output=True, timeout=60)
