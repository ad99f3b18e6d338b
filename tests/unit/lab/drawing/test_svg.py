"""The frame of a picture, for viewers of all kinds."""

from __future__ import annotations

import re

from dynaplan.lab.drawing.svg import RULES, document


def test_every_look_by_variable_comes_after_the_same_look_by_a_plain_colour() -> None:
    """Librsvg knows no variables: it drops what has them, and would draw nothing, or all of it black."""
    picture = document("t", "", 10, 10)
    plain, _, themed = picture.partition("@media")
    assert RULES in themed
    for rule in re.findall(r"^\S.*\{.*var\(--\w+\).*\}$", RULES, re.M):
        selector = rule.partition("{")[0]
        assert re.search(rf"^{re.escape(selector)}{{.*#[0-9a-f]{{3,6}}", plain, re.M), rule
