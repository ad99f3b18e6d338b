"""A recorded or made-up stream of requests, as simulation and forecasting read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynaplan.util.documents import shown


class TracedRequest(NamedTuple):
    """One request of a trace: its arrival in seconds since the beginning of the trace, and its lengths.

    ``block_hashes`` are the chained hashes of the prompt's full KV blocks, if the trace has them: equal
    hashes are shared prefixes. ``block_tokens`` is the length of one of these blocks, 0 without hashes.
    ``model`` is the model that was asked, empty where the trace does not say.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_tokens: int = 0
    model: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return one line of a recording as plain data, with blocks only if there are any."""
        document: dict[str, Any] = {
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        if self.block_hashes:
            document |= {"block_hashes": list(self.block_hashes), "block_tokens": self.block_tokens}
        if self.model:
            document["model"] = self.model
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TracedRequest:
        """Read ``to_json``'s form; raises KeyError or ValueError that names a wrong field.

        Unknown fields are ignored.
        """
        hashes = document.get("block_hashes") or ()
        if not isinstance(hashes, list | tuple) or not all(map(_is_integer, hashes)):
            raise ValueError(f"block_hashes is {shown(hashes)}, which is no list of whole numbers")
        return cls(
            seconds(document, "arrival_s"),
            tokens(document, "prompt_tokens"),
            tokens(document, "output_tokens"),
            tuple(hashes),
            tokens(document, "block_tokens", least=1) if hashes else 0,
            model_name(document),
        )

    def with_blocks_of(self, block_tokens: int) -> TracedRequest:
        """Return the same request with hashes of its full blocks of another length, an engine's own.

        A longer block of the trace becomes several, which are shared whenever it is. Several shorter ones
        become one, which is shared when all of them are. Prefixes are taken to be shared in whole blocks of
        the trace's length, since the trace has nothing finer.
        """
        if not self.block_hashes or self.block_tokens == block_tokens:
            return self
        number = self.prompt_tokens // block_tokens
        hashes = []
        for block in range(number):
            # A chained hash covers everything before it, so that of the block in which ours ends will do.
            source, offset = divmod((block + 1) * block_tokens - 1, self.block_tokens)
            if source >= len(self.block_hashes):
                break
            hashes.append(self.block_hashes[source] * self.block_tokens + offset)
        return self._replace(block_hashes=tuple(hashes), block_tokens=block_tokens)


def seconds(document: Mapping[str, Any], field: str) -> float:
    """Read a number of seconds; raises KeyError without the field, ValueError for something else."""
    value = document[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e12 < value < 1e12:
        raise ValueError(f"{field} is {shown(value)}, which is no number of seconds")
    return float(value)


def tokens(document: Mapping[str, Any], field: str, least: int = 0) -> int:
    """Read a number of tokens; raises KeyError without the field, ValueError for something else."""
    value = document[field]
    if not _is_integer(value) or not least <= value <= 1 << 40:
        raise ValueError(f"{field} is {shown(value)}, which is no number of tokens")
    return int(value)


def model_name(document: Mapping[str, Any]) -> str:
    """Read the name of a model, which a trace may leave out; raises ValueError for something else."""
    value = document.get("model")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"model is {shown(value)}, which is no name")
    return value or ""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
