"""What the simulated engine's steps do to its blocks becomes changes with parents and own hashes."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.engines.kv_events import BlockChange, Removed, Stored
from dynaplan.engines.sim.block_changes import BlockChanges
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.kv_blocks import block_hashes, own_hashes
from dynaplan.engines.timing_model.step_timing import StepTiming

TIMING = StepTiming(lambda tokens: 5.0 + tokens, lambda decodes, kv: 2.0)


class Engine:
    """A model of 8 blocks of 2 tokens, and what it told."""

    def __init__(self) -> None:
        self.told: list[Sequence[BlockChange]] = []
        self.changes = BlockChanges(self.told.append, 2)
        settings = EngineSettings(total_blocks=8, block_tokens=2, context_tokens=16, batched_tokens=4)
        self.model = EngineModel(settings, TIMING, self.changes)
        self.count = 0

    def serve(self, prompt: Sequence[int]) -> None:
        hashes = block_hashes(prompt, 2)
        self.count += 1
        self.model.submit(EngineRequest(str(self.count), len(prompt), 1, hashes))
        self.changes.add_prompt(prompt, hashes)
        while not self.model.is_idle:
            self.model.step()
            self.changes.flush()
        self.changes.remove_prompt(hashes)


def test_each_step_tells_the_blocks_that_it_has_filled_after_the_ones_before() -> None:
    engine = Engine()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    hashes, own = block_hashes(prompt, 2), own_hashes(prompt, 2)
    engine.serve(prompt)
    assert engine.told == [
        [Stored(None, tuple(hashes[:2]), tuple(own[:2]))],
        [Stored(hashes[1], tuple(hashes[2:]), tuple(own[2:]))],
    ]


def test_a_repeated_prompt_tells_nothing_and_a_longer_one_what_is_new() -> None:
    engine = Engine()
    engine.serve([1, 2, 3])
    engine.told.clear()
    engine.serve([1, 2, 3])
    assert engine.told == []
    engine.serve([1, 2, 3, 4, 5])
    hashes, own = block_hashes([1, 2, 3, 4], 2), own_hashes([1, 2, 3, 4], 2)
    assert engine.told == [[Stored(hashes[0], (hashes[1],), (own[1],))]]


def test_blocks_whose_places_are_needed_are_removed_before_the_new_ones_are_stored() -> None:
    engine = Engine()
    engine.serve(range(100, 112))
    engine.told.clear()
    engine.serve(range(200, 212))
    assert isinstance(engine.told[0][0], Removed)
    assert isinstance(engine.told[0][1], Stored)


def test_two_prompts_in_one_step_are_two_chains() -> None:
    engine = Engine()
    for prompt in ([1, 2], [3, 4]):
        engine.model.submit(EngineRequest(str(prompt), 2, 1, block_hashes(prompt, 2)))
        engine.changes.add_prompt(prompt, block_hashes(prompt, 2))
    engine.model.step()
    engine.changes.flush()
    (first,), (second,) = block_hashes([1, 2], 2), block_hashes([3, 4], 2)
    assert engine.told == [[Stored(None, (first,), (first,)), Stored(None, (second,), (second,))]]


def test_nothing_is_remembered_of_a_prompt_that_was_never_computed() -> None:
    engine = Engine()
    hashes = block_hashes([1, 2, 3, 4], 2)
    engine.changes.add_prompt([1, 2, 3, 4], hashes)
    engine.changes.add_prompt([1, 2], hashes[:1])
    engine.changes.remove_prompt(hashes)
    engine.changes.remove_prompt(hashes[:1])
    assert engine.changes._origins == {}
