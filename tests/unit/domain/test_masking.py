from __future__ import annotations

from typing import Any

import pytest

from dynaplan.domain.masking import MASK, looks_secret, mask_all, mask_secrets


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "password", "hfToken"])
def test_a_name_with_a_word_for_a_secret_looks_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["max-tokens", "keyboard", "model"])
def test_a_name_without_one_does_not(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"a": 1, "b": {"c": "d"}}, {"a": MASK, "b": {"c": MASK}}),
        (["a", ("b", 2)], [MASK, [MASK, MASK]]),
        ("a", MASK),
    ],
)
def test_masking_everything_keeps_the_structure_and_the_keys(value: Any, masked: Any) -> None:
    assert mask_all(value) == masked


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"api-key": ["a", "b"], "model": "m"}, {"api-key": [MASK, MASK], "model": "m"}),
        (
            {"ServiceArgs": {"envs": {"A": "b"}, "workers": 2}},
            {"ServiceArgs": {"envs": {"A": MASK}, "workers": 2}},
        ),
        (["--api-key", "a", "--model", "m"], ["--api-key", MASK, "--model", "m"]),
        (["--api-key=a"], [f"--api-key={MASK}"]),
        ("nats://user:word@host:1", f"nats://{MASK}@host:1"),
        (7, 7),
    ],
)
def test_only_the_secrets_of_a_document_are_masked(value: Any, masked: Any) -> None:
    assert mask_secrets(value) == masked
