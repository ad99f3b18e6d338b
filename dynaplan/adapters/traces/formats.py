"""The formats of trace files. Each is known by its first line, never by the file's name."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynaplan.domain.trace import TracedRequest, seconds, tokens

MOONCAKE_BLOCK_TOKENS = 512
MOST_DIGITS = 13

NumberedRequests = Iterator[tuple[int, TracedRequest]]
"""Line numbers, from 1, and requests; arrivals in seconds since whatever the file counts from."""


class BadLine(Exception):
    """A line is not what the format wants. ``number`` counts from 1."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number


@dataclass(frozen=True)
class Format:
    """One format: whether a first line is of it, what a line must look like, and how to read all of them."""

    name: str
    expected: str
    is_first_line: Callable[[str], bool]
    read: Callable[[Iterable[str]], NumberedRequests]


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _columns(line: str) -> list[str]:
    return [each.strip() for each in next(csv.reader([line]), [])]


def _is_azure(first_line: str) -> bool:
    return set(AZURE_COLUMNS) <= set(_columns(first_line))


def _read_azure(lines: Iterable[str]) -> NumberedRequests:
    rows = csv.reader(lines)
    columns = [each.strip() for each in next(rows)]
    at, prompt, output = map(columns.index, AZURE_COLUMNS)
    for row in rows:
        if not row:
            continue
        try:
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} columns where the header has {len(columns)}")
            request = TracedRequest(
                _timestamp_s(row[at]),
                _count(row[prompt], "ContextTokens"),
                _count(row[output], "GeneratedTokens"),
            )
        except ValueError as error:
            raise BadLine(rows.line_num, str(error)) from None
        yield rows.line_num, request


def _timestamp_s(text: str) -> float:
    """Seconds since 1970. Without a zone it is taken as UTC: only differences matter."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}, which is no date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(text: str, column: str) -> int:
    # ASCII digits only: int() also takes signs, underscores and digits of other scripts.
    if not (text.isascii() and text.strip().isdigit() and len(text) < MOST_DIGITS):
        raise ValueError(f"{column} is {text!r}, which is no number of tokens")
    return int(text)


def _json_lines(lines: Iterable[str], read: Callable[[Mapping[str, Any]], TracedRequest]) -> NumberedRequests:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise ValueError("a line that is no JSON object")
            request = read(document)
        except KeyError as error:
            raise BadLine(number, f"{error.args[0]} is missing") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise BadLine(number, str(error)) from None
        yield number, request


def _has_keys(*keys: str) -> Callable[[str], bool]:
    def is_first_line(line: str) -> bool:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            return False
        return isinstance(document, dict) and set(keys) <= set(document)

    return is_first_line


def _from_mooncake(document: Mapping[str, Any]) -> TracedRequest:
    """Its hashes are chained already; that of a last, part-filled block is no full block's."""
    prompt_tokens = tokens(document, "input_length")
    full = prompt_tokens // MOONCAKE_BLOCK_TOKENS
    hashes = (document.get("hash_ids") or [])[:full]
    return TracedRequest.from_json(
        {
            "arrival_s": seconds(document, "timestamp") / 1000,
            "prompt_tokens": prompt_tokens,
            "output_tokens": tokens(document, "output_length"),
            "block_hashes": hashes,
            "block_tokens": MOONCAKE_BLOCK_TOKENS,
        }
    )


FORMATS = (
    Format("Azure CSV", f"the columns {', '.join(AZURE_COLUMNS)}", _is_azure, _read_azure),
    Format(
        "Mooncake JSON lines",
        "timestamp (ms), input_length, output_length and, if it likes, hash_ids",
        _has_keys("timestamp", "input_length", "output_length"),
        lambda lines: _json_lines(lines, _from_mooncake),
    ),
    Format(
        "dynaplan recording",
        "arrival_s, prompt_tokens, output_tokens and, if it likes, block_hashes with block_tokens",
        _has_keys("arrival_s", "prompt_tokens", "output_tokens"),
        lambda lines: _json_lines(lines, TracedRequest.from_json),
    ),
)
