"""Prompts of exact length."""

from __future__ import annotations

from dynaplan.lab.profiling.load.prompts import PromptMaker


def test_a_prompt_has_exactly_as_many_tokens_as_asked_for_and_is_the_same_again() -> None:
    assert len(PromptMaker(1).prompt(0, 777)) == 777
    assert PromptMaker(1).prompt(3, 50) == PromptMaker(1).prompt(3, 50)


def test_a_shorter_prompt_begins_the_longer_one_of_its_number() -> None:
    prompts = PromptMaker(1)
    assert prompts.prompt(0, 500)[:100] == prompts.prompt(0, 100) == PromptMaker(1).prompt(0, 100)


def test_no_two_numbers_and_no_two_seeds_begin_alike() -> None:
    beginnings = {tuple(PromptMaker(seed).prompt(number, 16)) for seed in (1, 2) for number in range(50)}
    assert len(beginnings) == 100
