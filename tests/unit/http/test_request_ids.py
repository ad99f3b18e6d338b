"""The ids of requests."""

from __future__ import annotations

from dynaplan.http.request_ids import request_id


def test_a_usable_id_is_kept_and_any_other_is_replaced_by_a_new_one() -> None:
    assert request_id("a-B_c.7:/+=@~") == "a-B_c.7:/+=@~"
    made = [request_id(given) for given in (None, "", "a b", "a\nb", "ä", "x" * 129)]
    assert len(set(made)) == len(made)
    assert all(len(bytes.fromhex(each)) == 16 for each in made)
