"""A slip in a YAML file is told with its line and with what to write instead."""

from __future__ import annotations

import pytest

from dynaplan.config.yaml_file import read_sections
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "line", "fault", "hint"),
    [
        ("Common:\n  model: a: b\n", 2, "a second ': '", "`model: 'a: b'`"),
        ("Common:\n  model: it's: b\n", 2, "a second ': '", "`model: 'it''s: b'`"),
        ("Common:\n\tmodel: x\n", 2, "a tab", "Indent with spaces"),
        ("Common:\n  model x\n  engine: sim\n", 2, "no ': ' after the key", "Write `model: x`."),
        ("Common:\n  model:x\n\n  engine: sim\n", 2, "no ': ' after the key", "Write `model: x`."),
        ("Common:\n  model: x\n    engine: y\n", 3, "another depth", "the same column"),
        ("Common:\n  model: x\n engine: y\n", 3, "another depth", "the same column"),
        ("Common:\n  - a\n  b: 1\n", 3, "another depth", "'- '"),
        ("Common:\n  model: @x\n", 2, "keeps for itself", "`model: '@x'`"),
        ("Common:\n  model: *x\n", 2, "keeps for itself", "`model: '*x'`"),
        ("Common:\n  - @x\n", 2, "keeps for itself", "in quotes"),
        ('Common:\n  model: "x\n  b: 1\n', 2, "not closed", "Close it"),
        ("Common:\n  list: [1,\n", 3, "not closed", "Close it"),
        ("Common: {a: 1\nB: {}\n", 1, "not closed", "Close it"),
        ("A: {}\n---\nB: {}\n", 2, "a second document", "remove the line"),
    ],
)
def test_a_slip_is_told_with_its_line_and_what_to_write(text: str, line: int, fault: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sections(text, "my.yaml")
    message = str(caught.value)
    assert message.startswith(f"my.yaml, line {line}")
    assert fault in message
    assert hint in message


@pytest.mark.parametrize("text", ["A: \x00", "A: !!python/object:os.x {}", "A: !!int x", "[" * 3000])
def test_other_text_that_is_no_yaml_names_its_source(text: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml"):
        read_sections(text, "my.yaml")
