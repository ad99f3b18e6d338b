"""Arbitrary JSON, and real values with something else in them: what a reader must be total over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MAX_EXAMPLES = 10_000 if os.environ.get("DYNAPLAN_TORTURE") else 100
"""Examples of each property. The 100 are the same in every run (``derandomize`` in ``tests/conftest.py``);
`tox -e torture` draws new ones."""

total = settings(max_examples=MAX_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
"""The settings of a test that a reader is total."""

Draw = Callable[[st.SearchStrategy[Any]], Any]

awkward = st.sampled_from(
    [
        *(-1, 0, 2**63, -(2**63) - 1, 10**400, 1e308, -1e-308, True, None, [], {}, [[]], {"": None}),
        *("", "x", "-1", "\x00", "\ud800", "²", "9" * 5000, "1e999", "nan"),
    ]
)

anything = awkward | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)

pieces = st.sampled_from(
    [
        *("{", "}", '"', "\n", "9" * 5000, "NaN", "+Inf", "-1", "1e999", "٣"),
        *("&a ", "*a", "!!x ", "? ", "<<: ", "[", ": "),
    ]
)

DEEP = ("[" * 200_000, '{"a":' * 5000, "[" * 900 + "]" * 900)


def mutated(document: Any, draw: Draw) -> Any:
    """The document with one value, at any depth, replaced by anything, left out, or there twice."""
    if isinstance(document, dict) and document and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(document)))
        if not draw(st.integers(0, 5)):
            return {key: value for key, value in document.items() if key != name}
        return {**document, name: mutated(document[name], draw)}
    if isinstance(document, list) and document and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(document) - 1))
        return [
            *document[:place],
            mutated(document[place], draw),
            *document[place + draw(st.integers(0, 1)) :],
        ]
    return draw(anything)


def json_text(real: Any, draw: Draw) -> str:
    """The text of a mutated document: whole, torn, nested too deep, or of a wrong kind."""
    document = mutated(real, draw)
    text = json.dumps(document)
    place = draw(st.integers(0, len(text)))
    return str(draw(st.sampled_from([text, text, text, text[:place], str(document), *DEEP])))


def text_of(real: str, draw: Draw) -> str:
    """A text of lines with a piece replaced by something else."""
    begin = draw(st.integers(0, len(real)))
    end = draw(st.integers(begin, min(len(real), begin + 40)))
    put = draw(st.text(max_size=8) | pieces)
    return real[:begin] + put + real[end:]


def bytes_of(real: bytes, draw: Draw) -> bytes:
    """Bytes with a piece replaced by something else."""
    begin = draw(st.integers(0, len(real)))
    end = draw(st.integers(begin, min(len(real), begin + 40)))
    return real[:begin] + draw(st.binary(max_size=8)) + real[end : draw(st.sampled_from([None, None, end]))]
