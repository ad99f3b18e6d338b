"""TLS by files: what is wrong with them is found before anybody connects, and renewed ones are used."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from dynaplan.http.client import try_get
from dynaplan.http.tls import ServerTls, UnusableTls, client_tls, trusted
from tests.fakes.certificates import Authority, CertificateFiles


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> CertificateFiles:
    return authority.issue("gpu1", "subjectAltName=DNS:gpu1.example,IP:192.0.2.7")


def tls_of(files: CertificateFiles) -> ServerTls:
    return ServerTls(str(files.certificate), str(files.key))


@pytest.mark.parametrize("name", ["", "gpu1.example", "192.0.2.7"])
def test_a_certificate_that_holds_the_name_has_no_fault(
    authority: Authority, files: CertificateFiles, name: str
) -> None:
    assert tls_of(files).fault(name) == ""
    assert tls_of(files).fault(name, str(authority.certificate)) == ""


def test_a_certificate_for_another_name_is_at_fault(files: CertificateFiles) -> None:
    assert "gpu2.example" in tls_of(files).fault("gpu2.example")
    assert "192.0.2.8" in tls_of(files).fault("192.0.2.8")


def test_a_certificate_that_has_expired_is_at_fault(authority: Authority) -> None:
    expired = tls_of(authority.issue("expired", "subjectAltName=DNS:gpu1.example", days=-1))
    assert expired.fault() == "certificate has expired"
    assert expired.fault("gpu1.example", str(authority.certificate)) == "certificate has expired"


def test_a_certificate_that_another_authority_signed_is_at_fault(
    files: CertificateFiles, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    assert "unable to get local issuer certificate" in tls_of(files).fault("", str(other.certificate))


def test_a_certificate_for_clients_only_is_at_fault(authority: Authority) -> None:
    wrong = authority.issue("client", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=clientAuth")
    assert "purpose" in tls_of(wrong).fault()


def test_files_that_cannot_be_used_are_named(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    certificate, key = str(files.certificate), str(files.key)
    empty = tmp_path / "empty.pem"
    empty.touch()
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    with pytest.raises(UnusableTls, match=r"missing\.pem: No such file"):
        ServerTls(str(tmp_path / "missing.pem"), key)
    with pytest.raises(UnusableTls, match="Is a directory"):
        ServerTls(certificate, str(tmp_path))
    with pytest.raises(UnusableTls, match=r"empty\.pem holds no certificate in PEM form"):
        ServerTls(str(empty), key)
    with pytest.raises(UnusableTls, match=r"gpu1\.pem holds no private key"):
        ServerTls(certificate, certificate)
    with pytest.raises(UnusableTls, match=r"broken\.pem with .*gpu1\.key"):
        ServerTls(str(broken), key)
    other = authority.issue("other")
    with pytest.raises(UnusableTls, match=r"other\.key does not belong to the certificate .*gpu1\.pem"):
        ServerTls(certificate, str(other.key))


def test_a_key_with_a_pass_phrase_is_refused_without_asking_for_it(
    files: CertificateFiles, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    words = ("-in", str(files.key), "-out", str(locked), "-passout", "pass:secret", "-aes256")
    subprocess.run(["openssl", "ec", *words], check=True, capture_output=True, timeout=60)
    with pytest.raises(UnusableTls, match=r"locked\.key asks for a pass phrase"):
        ServerTls(str(files.certificate), str(locked))


def test_authorities_are_of_a_file_or_the_systems(authority: Authority, tmp_path: Path) -> None:
    assert client_tls("") is True
    assert isinstance(client_tls(str(authority.certificate)), ssl.SSLContext)
    with pytest.raises(UnusableTls, match="No such file"):
        client_tls(str(tmp_path / "missing.pem"))
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    with pytest.raises(UnusableTls, match=r"broken\.pem"):
        client_tls(str(broken))


def test_only_addresses_of_this_host_need_no_verification() -> None:
    for url in ("https://127.0.0.1:1", "https://[::1]:1/metrics", "https://localhost"):
        assert trusted(url, True) is False
    for url in ("https://gpu1.example:1", "https://192.0.2.250:1", "nonsense"):
        assert trusted(url, True) is True


def test_renewed_files_are_used_and_unusable_ones_are_named_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second = authority.issue("first", days=1), authority.issue("second")
    used = CertificateFiles(tmp_path / "used.pem", tmp_path / "used.key")

    times_ns = itertools.count(1)

    def replace_by(new: CertificateFiles) -> None:
        for source, target in ((new.certificate, used.certificate), (new.key, used.key)):
            shutil.copy(source, target)
            os.utime(target, ns=(0, next(times_ns)))

    replace_by(first)
    tls = tls_of(used)
    context = tls.context
    assert tls.context is context
    replace_by(CertificateFiles(second.certificate, first.key))
    assert tls.context is context
    assert tls.context is context
    replace_by(second)
    assert tls.context is not context
    renewed = tls.context
    used.key.unlink()
    assert tls.context is renewed
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "does not belong to the certificate" in said[0]
    assert "has been renewed" in said[1]


async def test_the_health_of_a_server_of_this_host_is_asked_over_tls(files: CertificateFiles) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls_of(files).context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await try_get(f"https://127.0.0.1:{port}", timeout_s=5)
        assert await try_get(f"http://127.0.0.1:{port}", timeout_s=0.5) is None
