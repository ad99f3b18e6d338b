"""The names of LoRA adapters, in every form in which vLLM takes them."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.engines.common.kinds import lora_names


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (None, []),
        ("sql=/loras/sql", ["sql"]),
        ("sql=/loras/sql chat=/loras/chat", ["sql", "chat"]),
        (["sql=/loras/sql", "chat=/loras/chat"], ["sql", "chat"]),
        ('{"name": "sql", "path": "/loras/sql"}', ["sql"]),
        ([{"name": "sql", "path": "/loras/sql"}, '{"name": "chat"}'], ["sql", "chat"]),
        (["without", "{broken", {"path": "/x"}, 7], []),
    ],
)
def test_adapters_are_found_by_their_names(modules: Any, names: list[str]) -> None:
    assert lora_names(modules) == names
