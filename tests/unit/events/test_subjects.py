"""Subjects and patterns of events."""

from __future__ import annotations

import pytest

from dynaplan.events.subjects import KEPT, NOW, Start, Subject, matches
from dynaplan.util.errors import ConfigError


def test_a_subject_is_written_and_read() -> None:
    subject = Subject("vllm-agg", "backend", "kv_cache_update")
    assert str(subject) == "vllm-agg.backend.kv_cache_update"
    assert Subject.parse(str(subject)) == subject


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c.d", "a.*.c", "a..c", "a.b.>", "a b.c.d"])
def test_another_text_is_no_subject(text: str) -> None:
    assert Subject.parse(text) is None


@pytest.mark.parametrize("part", ["", "a.b", "*", ">", "a b", "ü"])
def test_a_part_that_nats_would_not_take_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a part of an event's subject"):
        Subject("ns", "backend", part)


def test_a_start_is_now_unless_it_says_another() -> None:
    assert [each.is_now for each in (NOW, KEPT, Start(unix_s=0.0))] == [True, False, False]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a", "a", True),
        ("a", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        (">", "a.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("*.b.>", "a.b.c", True),
        ("*.b.>", "a.c.c", False),
    ],
)
def test_wildcards_match_as_in_nats(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
