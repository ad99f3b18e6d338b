"""The formats of trace files. A file's first line shows its format, never its name."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dynaplan.contract.traced_requests import TracedRequest, seconds, tokens
from dynaplan.util.documents import number_field, object_field, parse_object, shown

MOONCAKE_BLOCK_TOKENS = 512
"""The tokens of a block in Mooncake's traces, as their paper states."""

MAX_DIGITS = 13
"""The digits from which on a number of tokens is an error: ten thousand billion."""

NumberedRequests = Iterator[tuple[int, TracedRequest]]
"""Line numbers, from 1, and requests; arrivals in seconds since the moment that the file counts from."""


class BadLine(Exception):
    """A line that breaks its format. ``number`` is the line's, from 1."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number


@dataclass(frozen=True)
class TraceFormat:
    """One format: its name, the lines that it expects in words, a test of the first line, and the reader."""

    name: str
    expected: str
    is_first_line: Callable[[str], bool]
    read: Callable[[Iterable[str]], NumberedRequests]


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of the Azure LLM inference traces of 2023 and 2024, in any order, beside others."""

MODEL_COLUMN = "Model"
"""The column of the model that was asked, which Azure's own traces lack."""


def _columns(line: str) -> list[str]:
    return [column.strip() for column in next(csv.reader([line]), [])]


def _is_azure(first_line: str) -> bool:
    return set(AZURE_COLUMNS) <= set(_columns(first_line))


def _read_azure(lines: Iterable[str]) -> NumberedRequests:
    rows = csv.reader(lines)
    columns = [column.strip() for column in next(rows)]
    at, prompt, output = map(columns.index, AZURE_COLUMNS)
    model = columns.index(MODEL_COLUMN) if MODEL_COLUMN in columns else None
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
                model="" if model is None else row[model].strip(),
            )
        except ValueError as error:
            raise BadLine(rows.line_num, str(error)) from None
        yield rows.line_num, request


EPOCH = datetime(1970, 1, 1)


def _timestamp_s(text: str) -> float:
    """Return the seconds since 1970. A time without a zone is taken as UTC: only differences matter."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo else (moment - EPOCH).total_seconds()
    except (ValueError, OverflowError):
        raise ValueError(f"TIMESTAMP is {shown(text)}, which is no date and time") from None


def _count(text: str, column: str) -> int:
    # ASCII digits only: int() also takes signs, underscores and digits of other scripts.
    if not (text.isascii() and text.strip().isdigit() and len(text) < MAX_DIGITS):
        raise ValueError(f"{column} is {shown(text)}, which is no number of tokens")
    return int(text.strip())  # which takes control characters away, as int() does not


def _json_lines(
    lines: Iterable[str], read: Callable[[Mapping[str, Any]], TracedRequest | None]
) -> NumberedRequests:
    """Read one JSON object a line; ``read`` returns None for a line of something else than a request."""
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
        if request:
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
    """Read one line of a Mooncake trace; its hashes are chained already.

    The hash of a last, part-filled block is left out.
    """
    prompt_tokens = tokens(document, "input_length")
    full = prompt_tokens // MOONCAKE_BLOCK_TOKENS
    hashes = (document.get("hash_ids") or [])[:full]
    return TracedRequest.from_json(
        {
            "arrival_s": _from_ms(document, "timestamp"),
            "prompt_tokens": prompt_tokens,
            "output_tokens": tokens(document, "output_length"),
            "block_hashes": hashes,
            "block_tokens": MOONCAKE_BLOCK_TOKENS,
            "model": document.get("model"),
        }
    )


DYNAMO_SCHEMA = "dynamo.request.trace.v1"
"""The schema of Dynamo's request traces, one record a line."""


def _is_dynamo(first_line: str) -> bool:
    try:
        document = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and _dynamo_record(document) is not None


def _dynamo_record(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the Dynamo record in a line, which some sinks wrap in an ``event``; None without one."""
    for record in (document, document.get("event")):
        if isinstance(record, dict) and record.get("schema") == DYNAMO_SCHEMA:
            return record
    return None


def _from_dynamo(document: Mapping[str, Any]) -> TracedRequest | None:
    """Read one record; None for those of tools and payloads, and of a stream that was cut off unanswered.

    Its hashes are chained already; the hash of a last, part-filled block is left out.
    """
    record = _dynamo_record(document)
    if record is None or record.get("event_type") != "request_end":
        return None
    request = record["request"]
    if not isinstance(request, dict):
        raise ValueError(f"request is {shown(request)}, which is no JSON object")
    replay = request.get("replay") or {"input_length": request["input_tokens"]}
    prompt_tokens, output_tokens = tokens(replay, "input_length"), tokens(request, "output_tokens")
    if not output_tokens:
        return None
    block_tokens = tokens(replay, "trace_block_size", least=1) if "trace_block_size" in replay else 0
    hashes = replay.get("input_sequence_hashes") or [] if block_tokens else []
    return TracedRequest.from_json(
        {
            "arrival_s": _received_s(record, request),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "block_hashes": hashes[: prompt_tokens // block_tokens] if block_tokens else [],
            "block_tokens": block_tokens,
            "model": request.get("model"),
        }
    )


def _received_s(record: Mapping[str, Any], request: Mapping[str, Any]) -> float:
    """Return the time of a request's arrival, s since 1970: noted, or its end less its duration."""
    if request.get("request_received_ms") is not None:
        return _from_ms(request, "request_received_ms")
    return _from_ms(record, "event_time_unix_ms") - _from_ms(request, "total_time_ms")


def _from_ms(document: Mapping[str, Any], field: str) -> float:
    """Read a number of ms as seconds; raises KeyError without the field, ValueError for something else."""
    value = document[field]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return seconds({field: value / 1000 if is_number else value}, field)


MAX_REQUESTS = 1_000_000
"""The requests of one recorded interval from which on a line is an error."""


def _read_decisions(lines: Iterable[str]) -> NumberedRequests:
    """Read a planner's ``decisions.jsonl`` as traffic: the requests of each interval, evenly spread over it.

    Lengths are the interval's means. Intervals without data are left out, for no data is not no traffic.
    """
    began_s = 0.0
    for number, line in enumerate(lines, 1):
        try:
            found = _measured(parse_object(line)) if line.strip() else None
        except ValueError as error:
            raise BadLine(number, str(error)) from None
        if found is None:
            continue
        interval_s, count, lengths = found
        for index in range(count):
            yield number, TracedRequest(began_s + index / count * interval_s, *lengths)
        began_s += interval_s


def _measured(document: Mapping[str, Any]) -> tuple[float, int, tuple[int, int]] | None:
    """Return the seconds of a recorded interval, its requests and their mean lengths; None without data."""
    interval_s = number_field(object_field(document, "settings"), "adjustment-interval")
    seen = object_field(document, "observation")
    traffic = {} if seen.get("early") else seen.get("traffic") or {}
    if not isinstance(traffic, dict) or traffic.get("requests") is None:
        return None
    names = ("requests", "interval_s", "isl_tokens", "osl_tokens")
    known = {name: traffic[name] for name in names if traffic.get(name) is not None}
    requests, lasted_s, isl, osl = (number_field(known, name, 0) for name in names)
    # One that lasted longer is scaled, as in the history of the planner itself.
    scaled = requests * interval_s / lasted_s if lasted_s > 0 else -1
    if interval_s <= 0 or not 0 <= scaled <= MAX_REQUESTS or min(isl, osl) < 0:
        raise ValueError(f"the traffic is {shown(known)}, which no interval has")
    return interval_s, round(scaled), (round(isl), round(osl))


FORMATS = (
    TraceFormat("Azure CSV", f"the columns {', '.join(AZURE_COLUMNS)}", _is_azure, _read_azure),
    TraceFormat(
        "Mooncake JSON lines",
        "timestamp (ms), input_length, output_length and perhaps hash_ids",
        _has_keys("timestamp", "input_length", "output_length"),
        lambda lines: _json_lines(lines, _from_mooncake),
    ),
    TraceFormat(
        "Dynamo's request trace",
        f"the schema {DYNAMO_SCHEMA} in every line",
        _is_dynamo,
        lambda lines: _json_lines(lines, _from_dynamo),
    ),
    TraceFormat(
        "dynaplan recording",
        "arrival_s, prompt_tokens, output_tokens and perhaps block_hashes with block_tokens",
        _has_keys("arrival_s", "prompt_tokens", "output_tokens"),
        lambda lines: _json_lines(lines, TracedRequest.from_json),
    ),
    TraceFormat(
        "decisions of a planner",
        "settings, and an observation with the traffic of the interval",
        _has_keys("wall_time", "settings", "observation", "decision"),
        _read_decisions,
    ),
)
"""All formats, in the order in which a first line is compared with them."""
