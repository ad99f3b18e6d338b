"""What a process's ports speak, and the certificates that are refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.config import certificates
from dynaplan.util.errors import ConfigError, DeploymentError
from tests.fakes.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("certificates"))
    made.issue("gpu1", "subjectAltName=DNS:gpu1.example")
    made.issue("expired", days=-1)
    return made


def environment(authority: Authority, name: str, ca: str = "") -> dict[str, str]:
    files = authority.directory
    environ = {"DYNAPLAN_TLS_CERT": f"{files}/{name}.pem", "DYNAPLAN_TLS_KEY": f"{files}/{name}.key"}
    return {**environ, "DYNAPLAN_TLS_CA": ca} if ca else environ


def test_without_files_ports_speak_in_clear_and_the_systems_authorities_are_believed() -> None:
    certificates.check({})
    assert certificates.own_certificate({}) is None
    assert certificates.authorities({}) is True


def test_a_certificate_is_checked_as_other_hosts_will(authority: Authority) -> None:
    ca = str(authority.certificate)
    certificates.check(environment(authority, "gpu1", ca), "gpu1.example")
    certificates.check(environment(authority, "gpu1"))
    with pytest.raises(ConfigError, match=r"other hosts, at gpu2\.example, would refuse --tls-cert"):
        certificates.check(environment(authority, "gpu1", ca), "gpu2.example")
    with pytest.raises(ConfigError, match=r"clients would refuse .*expired\.pem: certificate has expired"):
        certificates.check(environment(authority, "expired"))


def test_a_certificate_that_expires_later_does_not_keep_a_process_from_coming_back(
    authority: Authority,
) -> None:
    assert certificates.own_certificate(environment(authority, "expired"))


def test_files_that_cannot_be_used_are_named_with_their_option(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"--tls-cert and --tls-key cannot be used: .*missing\.pem"):
        certificates.check(environment(authority, "missing"))
    with pytest.raises(ConfigError, match=r"--tls-ca cannot be used: .*ca\.pem: No such file"):
        certificates.check({"DYNAPLAN_TLS_CA": str(tmp_path / "ca.pem")})
