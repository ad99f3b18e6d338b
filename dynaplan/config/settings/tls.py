"""TLS of the ports that other hosts reach: its files, as options and as variables.

They belong to a host and not to a graph, so they are options of commands, and no keys of a YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dynaplan.config.settings.fields import READ, Options, Settings, option, options_of
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class TlsSettings(Settings):
    """The PEM files of TLS; None for clear text, and for the authorities that the system trusts."""

    READS_TEXT = True

    tls_cert: str | None = option(
        None,
        "Certificate of this host, with its chain: the public port and `--advertise-host` speak https",
        path=READ,
    )
    tls_key: str | None = option(None, "The certificate's private key", path=READ)
    tls_ca: str | None = option(
        None,
        "Certificates of the authorities that vouch for other hosts' components",
        path=READ,
        shown="the system's",
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables; raises ConfigError for one file of certificate and key without the other."""
        given = {name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)}
        return cls.from_options(given, VARIABLES)

    def check(self, given: frozenset[str] = frozenset()) -> None:
        """Raise ConfigError for one of certificate and key without the other."""
        if (self.tls_cert is None) != (self.tls_key is None):
            has, lacks = ("tls-cert", "tls-key") if self.tls_cert else ("tls-key", "tls-cert")
            raise ConfigError(
                f"--{has} is given without --{lacks}",
                hint=f"Certificate and key belong together; {VARIABLES[lacks]} names the other one, too.",
            )


OPTIONS: Options = options_of(TlsSettings)

VARIABLES: Mapping[str, str] = {
    "tls-cert": "DYNAPLAN_TLS_CERT",
    "tls-key": "DYNAPLAN_TLS_KEY",
    "tls-ca": "DYNAPLAN_TLS_CA",
}
"""Option -> the variable by which a deployment's processes have it."""

CA_VARIABLE = VARIABLES["tls-ca"]
