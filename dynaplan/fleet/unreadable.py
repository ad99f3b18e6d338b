"""Keys of a namespace that hold what dynaplan cannot read: ignored by every process, shown by ``status``."""

from __future__ import annotations

from collections.abc import Iterable

from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.store_keys import (
    COUNT_KEYS,
    LIVE_SETTINGS,
    by_name,
    fleet_key,
    live_setting,
    live_settings_prefix,
    planner_prefix,
    scaling_prefix,
)
from dynaplan.fleet.rules.lost_keys import USER_SET_KEYS
from dynaplan.store.instances import INSTANCES_BUCKET, SERVICES_PREFIX, Instance, not_callable
from dynaplan.store.model import KeyValue
from dynaplan.util.documents import parse_object, shown, whole_number

NUMBERS = (*COUNT_KEYS.values(), "decision_id", "scaled_decision_id")


def prefixes(namespace: str) -> tuple[str, ...]:
    """The prefixes of the keys that ``unreadable`` knows how to judge."""
    instances = f"{SERVICES_PREFIX}{namespace}/", f"{INSTANCES_BUCKET}/{namespace}/"
    settings = scaling_prefix(namespace), live_settings_prefix(namespace)
    return *instances, *settings, fleet_key(namespace)


def unreadable(namespace: str, items: Iterable[KeyValue]) -> dict[str, str]:
    """Why a value is ignored, by key; keys whose value is as it should be are left out."""
    reasons = {item.key: _fault(namespace, item) for item in items}
    return {key: reason for key, reason in reasons.items() if reason}


def uncallable(items: Iterable[KeyValue]) -> dict[str, str]:
    """The addresses of the readable instances among these that dynaplan cannot call over HTTP, by key."""
    return {item.key: reached for item in items if (reached := _reached_otherwise(item))}


def _reached_otherwise(item: KeyValue) -> str:
    is_ours, is_dynamos = item.key.startswith(SERVICES_PREFIX), item.key.startswith(INSTANCES_BUCKET)
    try:
        if is_dynamos or (is_ours and not Instance.from_json(item.value).url):
            return not_callable(item.value)
    except ValueError:
        pass  # it is unreadable
    return ""


def _fault(namespace: str, item: KeyValue) -> str:
    try:
        if item.key.startswith(SERVICES_PREFIX):
            Instance.from_json(item.value)
        elif item.key.startswith(INSTANCES_BUCKET):
            not_callable(item.value)
        elif item.key == fleet_key(namespace):
            FleetCounts.from_json(parse_object(item.value))
        elif names := by_name(namespace, {item.key: item.value}).keys() & USER_SET_KEYS.keys():
            USER_SET_KEYS[names.pop()](item.value)
        elif item.key.removeprefix(planner_prefix(namespace)) in NUMBERS and whole_number(item.value) is None:
            return f"{shown(item.value)}: expected a whole number"
        elif item.key.removeprefix(live_settings_prefix(namespace)) in LIVE_SETTINGS:
            is_good = live_setting(item.value) is not None
            return "" if is_good else f"{shown(item.value)}: expected a whole number from 0 on"
    except ValueError as error:
        return str(error)
    return ""
