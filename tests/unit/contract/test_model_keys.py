"""What is said about models through the store: written and read again, and nothing else is believed."""

from __future__ import annotations

import pytest

from dynaplan.contract.model_keys import (
    NO_ORDER,
    ModelDemand,
    ModelOrders,
    ModelReport,
    PoolReport,
    Refusal,
    demand_in,
    demand_text,
    reports_in,
)


def test_the_demand_of_all_frontends_is_added_up() -> None:
    one = {"a": ModelDemand(2, 100.0, 1, 90.0), "b": ModelDemand()}
    two = {"a": ModelDemand(1, 50.0, 0, 95.0)}
    assert demand_in([demand_text(one), demand_text(two), "[]", '{"a": 3}']) == {
        "a": ModelDemand(3, 50.0, 1, 95.0)
    }


def test_the_last_request_says_for_how_long_its_model_is_kept() -> None:
    short, later = ModelDemand(last_use_unix_s=90.0, keep_alive_s=0.0), ModelDemand(last_use_unix_s=95.0)
    for texts, expected in (((short,), 0.0), ((short, later), None), ((later, short), None)):
        read = demand_in(demand_text({"a": each}) for each in texts)
        assert read["a"].keep_alive_s == expected


def test_orders_are_kept_by_model_and_change_one_by_one() -> None:
    orders = ModelOrders.from_text("").changed("a", load_unix_s=5.0).changed("b", is_pinned=True)
    again = ModelOrders.from_text(orders.to_text())
    assert (again.of("a").load_unix_s, again.of("b").is_pinned, again.of("c")) == (5.0, True, NO_ORDER)


@pytest.mark.parametrize(
    "text", ["[]", '{"a": 1}', '{"a": {"is_pinned": "yes"}}', '{"a": {"load_unix_s": "x"}}']
)
def test_orders_of_another_form_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|is"):
        ModelOrders.from_text(text)


def test_reports_survive_the_published_document() -> None:
    report = ModelReport(
        "a",
        "loading",
        10.0,
        "why",
        True,
        (0,),
        refusal=Refusal(409, "pinned", 99.0),
        load_s=4.0,
        memory_bytes=5,
    )
    assert reports_in({"models": {"a": report.to_json(), "b": 3}}) == {"a": report}


def test_what_is_reported_of_prefill_workers_survives_too() -> None:
    prefill = PoolReport(
        workers={"ready": 2, "draining": 1},
        max_workers=3,
        gpus_each=1.0,
        load_s=4.5,
        memory_bytes=7,
        planned_workers=2,
    )
    report = ModelReport("a", "ready", prefill=prefill)
    assert reports_in({"models": {"a": report.to_json()}}) == {"a": report}
