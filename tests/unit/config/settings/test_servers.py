"""Servers, the event plane and TLS of a deployment, as its environment names them."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    CA_VARIABLE,
    TLS_VARIABLES,
    TlsSettings,
    client_environment,
    describe_other_store,
    has_no_nats,
    has_store_address,
    is_nats_wanted,
    is_original,
    lease_ttl_s,
    max_age_s,
    server_addresses,
    shared_backend,
    store_backend,
)
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "backend"),
    [
        ("", "etcd"),
        ("etcd", "etcd"),
        ("kv_store", "etcd"),
        ("kv-store", "etcd"),
        (" ETCD ", "etcd"),
        ("nats", "nats"),
        ("file", "file"),
        ("kubernetes", "kubernetes"),
        ("mem", "mem"),
    ],
)
def test_a_word_chooses_the_store(word: str, backend: str) -> None:
    assert store_backend({BACKEND_VARIABLE: word}) == backend


def test_without_a_word_it_is_etcd() -> None:
    assert store_backend({}) == shared_backend({}) == "etcd"


def test_an_unknown_word_is_refused_with_the_nearest_one_and_where_it_stands() -> None:
    with pytest.raises(ConfigError, match=r"--store is 'flie'.*\n.*'file'"):
        store_backend({BACKEND_VARIABLE: "flie"}, "--store")


def test_a_store_in_memory_cannot_be_shared_and_file_is_named_instead() -> None:
    with pytest.raises(ConfigError, match=r"one process.*\n.*file"):
        shared_backend({BACKEND_VARIABLE: "mem"})
    assert shared_backend({BACKEND_VARIABLE: "nats"}) == "nats"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, False),
        ({"ETCD_ENDPOINTS": "http://etcd:2379"}, True),
        ({BACKEND_VARIABLE: "file", "ETCD_ENDPOINTS": "http://etcd:2379"}, False),
        ({BACKEND_VARIABLE: "file", "DYN_FILE_KV": "/kv"}, True),
        ({BACKEND_VARIABLE: "nats", "NATS_SERVER": "nats://box:4222"}, True),
        ({BACKEND_VARIABLE: "kubernetes"}, False),
        ({BACKEND_VARIABLE: "kubernetes", "POD_NAMESPACE": "team-a"}, True),
        ({BACKEND_VARIABLE: "mem"}, False),
    ],
)
def test_the_variable_of_the_chosen_store_says_where_it_is(environ: dict[str, str], says: bool) -> None:
    assert has_store_address(environ) is says


def test_a_deployment_without_nats_is_told_from_one_that_does_not_say() -> None:
    assert has_no_nats({"NATS_SERVER": ""})
    assert not has_no_nats({})
    assert not has_no_nats({"NATS_SERVER": "nats://box:4222"})


def test_a_client_gets_what_it_needs_to_find_the_servers_and_nothing_else() -> None:
    needed = {
        BACKEND_VARIABLE: "etcd",
        "ETCD_ENDPOINTS": "https://etcd:2379",
        "ETCD_AUTH_PASSWORD": "secret",
        "NATS_SERVER": "",
        "NATS_AUTH_TOKEN": "token",
        "DYN_FILE_KV": "/kv",
    }
    assert client_environment({**needed, "HOME": "/home/you", "ETCD_NAME": "x"}) == needed


def test_the_addresses_name_the_store_and_the_servers_that_there_are() -> None:
    etcd = {"ETCD_ENDPOINTS": "unix:///run/etcd/localhost:1", "NATS_SERVER": "nats://127.0.0.1:1"}
    assert server_addresses(etcd) == {
        "store": "etcd",
        "etcd": "unix:///run/etcd/localhost:1",
        "nats": "nats://127.0.0.1:1",
    }
    files = {BACKEND_VARIABLE: "file", "DYN_FILE_KV": "/kv", "NATS_SERVER": ""}
    assert server_addresses(files) == {"store": "file", "file": "/kv"}
    assert describe_other_store(etcd) == ""
    assert describe_other_store(files) == "file, /kv"


def test_what_people_see_of_a_store_has_no_password() -> None:
    nats = {BACKEND_VARIABLE: "nats", "NATS_SERVER": "nats://me:secret@box:4222"}
    assert describe_other_store(nats) == "nats, nats://***@box:4222"


@pytest.mark.parametrize(("text", "ttl_s"), [("", 10), ("5", 5), (" 30 ", 30)])
def test_the_lease_ttl_is_ten_seconds_unless_the_environment_says_another(text: str, ttl_s: int) -> None:
    assert lease_ttl_s({"ETCD_LEASE_TTL": text}) == ttl_s


@pytest.mark.parametrize("text", ["4", "31", "-5", "10.5", "10s", "nan", "9" * 30])
def test_a_lease_ttl_that_is_no_whole_number_from_5_to_30_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ETCD_LEASE_TTL is '.*': expected whole seconds, from 5 to 30"):
        lease_ttl_s({"ETCD_LEASE_TTL": text})


def test_commands_beside_serve_learn_the_lease_ttl() -> None:
    assert client_environment({"ETCD_LEASE_TTL": "5", "HOME": "/"}) == {"ETCD_LEASE_TTL": "5"}


@pytest.mark.parametrize(
    ("environ", "is_wanted"),
    [({}, False), ({"NATS_SERVER": "nats://x"}, False), ({"DYN_EVENT_PLANE": " NATS "}, True)],
)
def test_a_nats_server_for_events_is_asked_for(environ: dict[str, str], is_wanted: bool) -> None:
    assert is_nats_wanted(environ) is is_wanted


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"DYN_EVENT_PLANE": "zmq"}, "DYN_EVENT_PLANE is 'zmq': events travel over NATS alone"),
        ({"DYN_NATS_STREAM_MAX_AGE": "1h"}, "DYN_NATS_STREAM_MAX_AGE is '1h'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "0"}, "is '0'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "nan"}, "is 'nan'"),
        ({"DYNAPLAN_COMPAT": "dynamite"}, "DYNAPLAN_COMPAT is 'dynamite'"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        is_nats_wanted(environ)


def test_events_are_kept_for_an_hour_unless_it_is_said() -> None:
    assert [max_age_s({}), max_age_s({"DYN_NATS_STREAM_MAX_AGE": "60"})] == [3600.0, 60.0]


def test_the_originals_form_is_asked_for() -> None:
    assert [is_original({}), is_original({"DYNAPLAN_COMPAT": "Dynamo"})] == [False, True]


def test_each_option_has_a_variable() -> None:
    assert TLS_VARIABLES == {
        "tls-cert": "DYNAPLAN_TLS_CERT",
        "tls-key": "DYNAPLAN_TLS_KEY",
        "tls-ca": "DYNAPLAN_TLS_CA",
    }
    assert CA_VARIABLE == "DYNAPLAN_TLS_CA"


def test_without_the_variables_everything_is_in_clear() -> None:
    assert TlsSettings.from_environment({}) == TlsSettings()
    assert TlsSettings.from_environment(dict.fromkeys(TLS_VARIABLES.values(), "")) == TlsSettings()


def test_the_variables_name_the_files() -> None:
    environ = {"DYNAPLAN_TLS_CERT": "/c.pem", "DYNAPLAN_TLS_KEY": "/c.key", "DYNAPLAN_TLS_CA": "/ca.pem"}
    assert TlsSettings.from_environment(environ) == TlsSettings("/c.pem", "/c.key", "/ca.pem")


@pytest.mark.parametrize(("has", "lacks"), [("tls-cert", "tls-key"), ("tls-key", "tls-cert")])
def test_certificate_and_key_belong_together(has: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"--{has} is given without --{lacks}"):
        TlsSettings.from_environment({TLS_VARIABLES[has]: "/file.pem"})
