"""The files of TLS, as options and as variables."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.tls import CA_VARIABLE, VARIABLES, TlsSettings
from dynaplan.util.errors import ConfigError


def test_each_option_has_a_variable() -> None:
    assert VARIABLES == {
        "tls-cert": "DYNAPLAN_TLS_CERT",
        "tls-key": "DYNAPLAN_TLS_KEY",
        "tls-ca": "DYNAPLAN_TLS_CA",
    }
    assert CA_VARIABLE == "DYNAPLAN_TLS_CA"


def test_without_the_variables_everything_is_in_clear() -> None:
    assert TlsSettings.from_environment({}) == TlsSettings()
    assert TlsSettings.from_environment(dict.fromkeys(VARIABLES.values(), "")) == TlsSettings()


def test_the_variables_name_the_files() -> None:
    environ = {"DYNAPLAN_TLS_CERT": "/c.pem", "DYNAPLAN_TLS_KEY": "/c.key", "DYNAPLAN_TLS_CA": "/ca.pem"}
    assert TlsSettings.from_environment(environ) == TlsSettings("/c.pem", "/c.key", "/ca.pem")


@pytest.mark.parametrize(("has", "lacks"), [("tls-cert", "tls-key"), ("tls-key", "tls-cert")])
def test_certificate_and_key_belong_together(has: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"--{has} is given without --{lacks}"):
        TlsSettings.from_environment({VARIABLES[has]: "/file.pem"})
