"""The file of keys: what it may hold, who may read it, and what commands change in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dynaplan.config.keys import (
    expires_unix_s,
    hash_of,
    new_key,
    parse_keys,
    read_keys_file,
    with_entry,
    without_entry,
)
from dynaplan.config.settings.keys import KeySettings
from dynaplan.util.errors import ConfigError

HASH = hash_of("sk-alice")
TEXT = f"""\
# of the lab
alice:
  hash: {HASH}
  requests_per_minute: 5
  expires: "2027-01-31"

# a guest
bob:
  hash: {hash_of("sk-bob")}
"""


def test_a_key_is_found_by_its_hash_and_has_its_name() -> None:
    key = parse_keys(TEXT, "keys.yaml")[HASH]
    assert (key.name, key.requests_per_minute, key.models, key.admin) == ("alice", 5, None, False)
    assert expires_unix_s(key) < math.inf


def test_a_new_key_has_256_bits_and_no_two_are_alike() -> None:
    key = new_key()
    assert key.startswith("sk-")
    assert len(key) == 3 + 43
    assert key != new_key()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("hash: sk-alice", "alice: hash is 'sk-alice'"),
        ("", "alice: hash is ''"),
        (f"hash: {HASH}\n  concurency: 2", "alice: a key has no option 'concurency'"),
        (f"hash: {HASH}\n  concurrency: 0", "alice: concurrency is 0"),
        (f"hash: {HASH}\n  models: []", "alice: models is empty"),
        (f"hash: {HASH}\n  priority: urgent", "alice: priority is 'urgent'"),
        (f"hash: {HASH}\n  expires: soon", "alice: expires is 'soon'"),
        (f"hash: {HASH}\nbob:\n  hash: {HASH}", "bob: its hash is alice's too"),
        (f"hash: {HASH}\nwith space:\n  hash: {HASH}", "with space: that is no name"),
    ],
)
def test_what_is_wrong_is_named_with_the_file_and_the_entry(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^keys.yaml: {message}"):
        parse_keys(f"alice:\n  {entry}\n", "keys.yaml")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as faults:
        parse_keys("alice:\n  hash: x\nbob:\n  hash: y\n", "keys.yaml")
    assert "alice" in str(faults.value)
    assert "bob" in str(faults.value)


def test_a_file_that_others_may_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(TEXT)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640: others may read or change it") as refusal:
        read_keys_file(file)
    assert refusal.value.hint == f"Expected a file of yours: chmod 600 {file}"
    file.chmod(0o600)
    assert len(read_keys_file(file)) == 2


def test_a_missing_file_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as refusal:
        read_keys_file(tmp_path / "keys.yaml")
    assert "dynaplan keys add" in refusal.value.hint


def test_an_entry_is_added_as_it_is_read() -> None:
    carol = KeySettings(
        hash_of("sk-carol"), ["a:7b", "b"], 2, None, 1000, "low", "2027-01-31", admin=True, name="carol"
    )
    text = with_entry(TEXT, carol)
    assert text.startswith(TEXT)
    assert parse_keys(text, "")[carol.hash] == carol


def test_an_entry_is_taken_out_and_the_comments_of_others_stay() -> None:
    assert without_entry(TEXT, "alice").startswith("# of the lab\n\n# a guest\nbob:\n")
    assert list(parse_keys(without_entry(TEXT, "bob"), "")) == [HASH]
    assert parse_keys(without_entry(without_entry(TEXT, "bob"), "alice"), "") == {}
