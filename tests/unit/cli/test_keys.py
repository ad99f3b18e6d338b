"""``dynaplan keys``: keys are made, listed and revoked in a file, and their usage is shown."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli import keys
from dynaplan.config.keys import hash_of, read_keys_file
from dynaplan.fleet import deployments
from dynaplan.gateway.keys.usage import Amounts, usage_text
from dynaplan.util.errors import ConfigError, DeploymentError


def run(*words: str) -> Result:
    return CliRunner().invoke(keys.command, list(words), catch_exceptions=False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual file of a directory in which no deployment runs."""

    def no_deployment(namespace: str | None = None) -> None:
        raise DeploymentError("none")

    monkeypatch.setattr(deployments, "find_deployment", no_deployment)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "keys.yaml"


def test_a_key_is_printed_once_and_its_hash_is_written_for_its_owner_alone(file: Path) -> None:
    made = run("add", "alice", "--models", "a, b", "--requests-per-minute", "5", "--admin")
    key = made.stdout.strip()
    assert "shown only now" in made.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()
    alice = read_keys_file(file)[hash_of(key)]
    assert (alice.name, alice.models, alice.requests_per_minute, alice.admin) == (
        "alice",
        ["a", "b"],
        5,
        True,
    )


@pytest.mark.parametrize("option", ["--models", "--concurrency", "--priority", "--expires"])
def test_an_option_without_its_value_makes_no_key_that_lacks_it(file: Path, option: str) -> None:
    assert "requires an argument" in run("add", "alice", option).stderr
    assert not file.exists()


def test_where_there_are_no_keys_to_revoke_another_file_is_asked_for(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no key of bob\n.*--api-keys FILE names another"):
        run("revoke", "bob")


def test_the_list_has_the_limits_and_no_hash(file: Path) -> None:
    run("add", "alice", "--expires", "2020-01-01")
    for words in (("list",), ("list", "--json")):
        shown = run(*words).stdout
        assert "alice" in shown
        assert "sha256" not in shown
    assert "2020-01-01 (is over)" in run("list").stdout


def test_a_name_has_one_key_until_it_is_revoked(file: Path) -> None:
    run("add", "alice")
    with pytest.raises(ConfigError, match="has a key of alice already"):
        run("add", "alice")
    with pytest.raises(ConfigError, match="no key of alise") as refusal:
        run("revoke", "alise")
    assert refusal.value.hint == "Did you mean 'alice'?"
    run("revoke", "alice")
    assert read_keys_file(file) == {}
    run("add", "alice")


def test_what_is_no_name_and_what_is_no_limit_change_nothing(file: Path) -> None:
    with pytest.raises(ConfigError, match="is no name of a key"):
        run("add", "a b")
    with pytest.raises(ConfigError, match="expires is 'soon'"):
        run("add", "alice", "--expires", "soon")
    with pytest.raises(ConfigError, match="concurrency is 0"):
        run("add", "alice", "--concurrency", "0")
    assert not file.exists()


def test_usage_adds_up_the_days_and_is_comma_separated_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "find_deployment", lambda _: SimpleNamespace(log_dir=tmp_path))
    (tmp_path / "usage").mkdir()
    for ago, requests in ((0, 1), (1, 2), (9, 100)):
        day = date.today() - timedelta(days=ago)
        both = {("alice", "m"): Amounts(requests, 10, 20), ("bob", "m"): Amounts(7, 1, 1)}
        (tmp_path / "usage" / f"{day}.csv").write_text(usage_text(both))
    today, both_days = run("usage", "alice"), run("usage", "alice", "--days", "2")
    assert today.stdout.split()[-5:] == ["alice", "m", "1", "10", "20"]
    assert both_days.stdout.split()[-5:] == ["alice", "m", "3", "20", "40"]
    lines = run("usage", "--days", "2", "--csv").stdout.splitlines()
    assert lines[0] == "day,key,model,requests,prompt_tokens,answer_tokens"
    assert len(lines) == 5
    assert "99999999 is not in the range" in run("usage", "--days", "99999999").stderr
