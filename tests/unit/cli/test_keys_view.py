"""Who asks, as all frontends tell of it together."""

from __future__ import annotations

from typing import Any

from dynaplan.cli.keys_view import COLUMNS, key_rows, key_sentence, table_rows


def turns(key: str, waiting: int, running: int, work: float) -> dict[str, Any]:
    return {"key": key, "waiting": waiting, "running": running, "work": work}


LIMITS = [{"kind": "at a time", "used": 4, "limit": 4}, {"kind": "requests/min", "used": 58, "limit": 60}]
OF_ALICE = "4 of 4 at a time, 58 of 60 requests/min"
ANSWERS = [
    {
        "turns": {"qwen": [turns("alice", 3, 2, 600.0), turns("bob", 0, 1, 400.0), turns("away", 0, 0, 0.0)]},
        "limits": {"alice": LIMITS},
    },
    {},  # a frontend that does not answer
    {"turns": {"qwen": [turns("alice", 1, 2, 1000.0)], "bee": []}},  # started just now
]


def test_queues_of_frontends_add_up_and_limits_are_those_of_all_together() -> None:
    alice, bob = key_rows(ANSWERS)
    assert key_sentence(alice) == (
        "alice at qwen: 4 running, 4 waiting; the last waits behind 3 of its own; alice's share 80%;"
        f" {OF_ALICE}"
    )
    assert key_sentence(bob) == "bob at qwen: 1 running, 0 waiting; bob's share 20%"


def test_a_frontend_with_little_work_counts_little_in_the_shares() -> None:
    busy, idle = [turns("script", 200, 15, 9900.0)], [turns("alice", 0, 0, 100.0)]
    rows = key_rows([{"turns": {"m": busy}}, {"turns": {"m": idle}}])
    assert {row["key"]: row["share"] for row in rows} == {"script": 0.99, "alice": 0.01}


def test_the_table_has_a_row_for_each_key_and_is_empty_where_nobody_asks() -> None:
    assert table_rows(key_rows(ANSWERS)) == (
        COLUMNS,
        ("alice", "qwen", "4", "4", "80%", OF_ALICE),
        ("bob", "qwen", "1", "0", "20%", "-"),
    )
    assert table_rows(key_rows([{}])) == ()


def test_where_one_model_is_served_it_has_no_column() -> None:
    rows = key_rows([{"turns": {"": [turns("alice", 0, 1, 30.0)]}}])
    assert table_rows(rows)[1] == ("alice", "1", "0", "100%", "-")
    assert key_sentence(rows[0]) == "alice: 1 running, 0 waiting; alice's share 100%"
