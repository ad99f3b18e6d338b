"""Secrets leave the configuration, and one that cannot is an error."""

from __future__ import annotations

import pytest

from dynaplan.cli.exporting.secret_options import without_secrets
from dynaplan.domain.errors import ConfigError


def test_what_is_common_belongs_to_every_service() -> None:
    public = without_secrets({"Common": {"hf_token": "h"}, "VllmWorker": {"model": "m", "hf-token": "mine"}})
    assert public.of("VllmWorker") == {"HF_TOKEN": "mine"}
    assert public.of("PrefillWorker") == {"HF_TOKEN": "h"}
    assert public.sections == {"Common": {}, "VllmWorker": {"model": "m"}}


def test_other_arguments_of_a_service_stay() -> None:
    public = without_secrets({"VllmWorker": {"ServiceArgs": {"workers": 2, "envs": {"A": 1}}}})
    assert public.sections == {"VllmWorker": {"ServiceArgs": {"workers": 2}}}
    assert public.of("VllmWorker") == {"A": "1"}


@pytest.mark.parametrize(
    "section",
    [{"my-secret": "hidden-1"}, {"url": "http://me:pw@host"}, {"kv-events-config": '{"password": "p"}'}],
)
def test_any_other_secret_is_named_and_its_value_is_not(section: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"VllmWorker\.{next(iter(section))} holds a secret") as raised:
        without_secrets({"VllmWorker": section})
    assert next(iter(section.values())) not in str(raised.value)
