"""The certificates of this process: what its ports speak, and what it believes others by."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.config.settings.servers import TlsSettings
from dynaplan.http.tls import ClientTls, ServerTls, UnusableTls, client_tls
from dynaplan.util.errors import ConfigError, DeploymentError


def authorities(environ: Mapping[str, str]) -> ClientTls:
    """Return the authorities that verify other hosts' components; raises ConfigError for an unusable file."""
    try:
        return client_tls(TlsSettings.from_environment(environ).tls_ca or "")
    except UnusableTls as error:
        raise ConfigError(
            f"--tls-ca cannot be used: {error}", hint="Expected a readable PEM file with certificates."
        ) from error


def own_certificate(environ: Mapping[str, str]) -> ServerTls | None:
    """Return the certificate and key of this process's ports for other hosts; None for clear text.

    Raises DeploymentError when the files cannot be used, ConfigError for one of the two without the other.
    """
    settings = TlsSettings.from_environment(environ)
    if not (settings.tls_cert and settings.tls_key):
        return None
    try:
        return ServerTls(settings.tls_cert, settings.tls_key)
    except UnusableTls as error:
        raise DeploymentError(
            f"--tls-cert and --tls-key cannot be used: {error}",
            hint="Expected two readable PEM files: the certificate, with its chain, and its key.",
        ) from error


def check(environ: Mapping[str, str], advertised: str = "") -> None:
    """Raise a UserError for files that cannot be used, and for a certificate that others would refuse.

    ``advertised`` is the host name or address that other hosts use; empty where they have none.
    """
    authorities(environ)
    own = own_certificate(environ)
    if own is None:
        return
    settings = TlsSettings.from_environment(environ)
    authority = settings.tls_ca or "" if advertised else ""
    fault = own.fault(advertised, authority)
    if fault:
        where = f"other hosts, at {advertised}," if advertised else "clients"
        vouching = f" (as --tls-ca {authority} has it)" if authority else ""
        raise ConfigError(
            f"{where} would refuse --tls-cert {settings.tls_cert}: {fault}{vouching}",
            hint="Expected a certificate that is valid now, and with --advertise-host one that holds that "
            "name and comes from an authority that the other components know.",
        )
