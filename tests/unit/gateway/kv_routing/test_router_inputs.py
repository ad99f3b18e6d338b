"""Cached prefixes are reported by engines or predicted."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.kv_routing.router_inputs import CachedPrefixes, RouterInputs
from dynaplan.gateway.openai_api import PromptBlocks

TOKENIZED = PromptBlocks((1, 2, 3), 16, 50)
ESTIMATED = PromptBlocks((1, 2, 3), 16)


def send(prefixes: CachedPrefixes, blocks: PromptBlocks, instance_id: int) -> None:
    RouterInputs(prefixes).record_prompt(blocks, instance_id, 0.0)


class Told:
    """Engines that have told of these overlaps; those in ``current`` are heard without a gap."""

    def __init__(self, overlaps: dict[int, int], current: set[int]) -> None:
        self._overlaps = overlaps
        self.current = current

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        return dict(self._overlaps)

    def is_current(self, instance_id: int) -> bool:
        return instance_id in self.current


def test_without_events_a_worker_has_what_was_sent_there() -> None:
    prefixes = CachedPrefixes(FrontendSettings())
    send(prefixes, ESTIMATED, 7)
    assert prefixes.overlaps(ESTIMATED, [7, 8], 1.0) == {7: 3}
    assert not prefixes.is_reported(7)


def test_of_a_worker_that_is_heard_only_what_its_engine_tells_counts() -> None:
    prefixes = CachedPrefixes(FrontendSettings(), Told({7: 1}, {7, 8}))
    send(prefixes, TOKENIZED, 7)
    send(prefixes, TOKENIZED, 8)
    assert prefixes.overlaps(TOKENIZED, [7, 8], 1.0) == {7: 1}
    assert prefixes.is_reported(7)


def test_a_worker_that_is_not_heard_is_predicted_beside_one_that_is() -> None:
    prefixes = CachedPrefixes(FrontendSettings(), Told({7: 1}, {7}))
    send(prefixes, TOKENIZED, 8)
    assert prefixes.overlaps(TOKENIZED, [7, 8], 1.0) == {7: 1, 8: 3}


def test_when_events_stop_what_was_told_last_still_counts_and_what_is_sent_is_remembered() -> None:
    told = Told({7: 2, 8: 1}, {7, 8})
    prefixes = CachedPrefixes(FrontendSettings(), told)
    told.current.clear()
    assert prefixes.overlaps(TOKENIZED, [7, 8], 0.0) == {7: 2, 8: 1}
    send(prefixes, TOKENIZED, 8)
    assert prefixes.overlaps(TOKENIZED, [7, 8], 1.0) == {7: 2, 8: 3}


def test_blocks_of_unknown_tokens_are_predicted_even_where_engines_tell() -> None:
    prefixes = CachedPrefixes(FrontendSettings(), Told({7: 2}, {7}))
    send(prefixes, ESTIMATED, 7)
    assert prefixes.overlaps(ESTIMATED, [7], 1.0) == {7: 3}


def test_how_long_and_how_much_is_predicted_are_options() -> None:
    settings = FrontendSettings(router_ttl_s=10.0, router_max_tree_size=2, router_prune_target_ratio=1.0)
    prefixes = CachedPrefixes(settings)
    send(prefixes, ESTIMATED, 7)
    assert prefixes.overlaps(ESTIMATED, [7], 10.0) == {7: 2}
    assert prefixes.overlaps(ESTIMATED, [7], 10.1) == {}


def test_a_worker_that_left_is_forgotten() -> None:
    prefixes = CachedPrefixes(FrontendSettings())
    send(prefixes, ESTIMATED, 7)
    prefixes.remove_worker(7)
    assert prefixes.overlaps(ESTIMATED, [7], 0.0) == {}
