"""A change of an option of a component's engines: the planner asks for it, the fleet plugin has it made.

One key of the store, the last change alone. While it has no ``result`` it is under way: a fleet plugin that
is started again goes on with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from dynaplan.util.documents import number_field, parse_object, text_field, whole_field

OPTION_CHANGE = "option_change"
"""The name of the key, one of ``store_keys.EXTENSIONS``."""

DONE = "done"
"""The result of a change that every worker of the component has."""

RELOAD_INTERRUPTED = "a reload was interrupted"
"""The result of a change that has to wait for a person, who has a reload to finish."""


@dataclass(frozen=True)
class OptionChange:
    """One change. ``asked_s``, monotonic seconds, tells it from every other one of the deployment.

    ``option`` has its common name. ``result`` is empty at first, then ``DONE``, or why nothing was changed.
    """

    component: str
    option: str
    before: int
    after: int
    asked_s: float
    result: str = ""

    def __str__(self) -> str:
        return f"{self.component}.{self.option} {self.before} -> {self.after}"

    def to_text(self) -> str:
        """Return the text that ``from_text`` reads back."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> OptionChange:
        """Read the key's value; raises ValueError for another text."""
        document = parse_object(text)
        component, option = (text_field(document, name) for name in ("component", "option"))
        before, after = (whole_field(document, name) for name in ("before", "after"))
        asked_s = number_field(document, "asked_s")
        return cls(component, option, before, after, asked_s, text_field(document, "result", ""))

    def reversed(self, asked_s: float) -> OptionChange:
        """Return the change that takes this one back."""
        return replace(self, before=self.after, after=self.before, asked_s=asked_s, result="")
