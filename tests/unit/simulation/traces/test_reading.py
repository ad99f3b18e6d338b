from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.planner.forecasting.traffic_history import IntervalLoad, interval_history
from dynaplan.simulation.traces import reading
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.util.errors import ConfigError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2220670,879,55"
)
"""The first rows of the 2023 conversation trace: 7 digits, CRLF, and no line end after the last row."""

FROM_AZURE = [
    TracedRequest(0.0, 374, 44),
    TracedRequest(4.314579, 396, 109),
    TracedRequest(4.541477, 879, 55),
]


def written(directory: Path, content: str | bytes, name: str = "trace") -> Path:
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*documents: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in documents)


def recorded(*arrivals_s: float) -> str:
    return lines(*({"arrival_s": each, "prompt_tokens": 1, "output_tokens": 1} for each in arrivals_s))


def decided(early: str = "", **traffic: object) -> str:
    """One line of a planner's ``decisions.jsonl``."""
    observation = {"traffic": {"interval_s": 30.0, **traffic} if traffic else None, "early": early}
    settings = {"adjustment-interval": 30.0}
    return lines(
        {"wall_time": "", "settings": settings, "state": {}, "observation": observation, "decision": {}}
    )


@pytest.mark.parametrize(
    "text",
    [
        AZURE.splitlines()[0] + ",Model\n2023-11-16 18:15:46,374,44, qwen \n",
        lines({"timestamp": 0, "input_length": 374, "output_length": 44, "model": "qwen"}),
        lines({"arrival_s": 5.0, "prompt_tokens": 374, "output_tokens": 44, "model": "qwen"}),
    ],
    ids=["Azure", "Mooncake", "recording"],
)
def test_a_trace_may_say_which_model_was_asked(tmp_path: Path, text: str) -> None:
    (request,) = read_trace(written(tmp_path, text))
    assert request == TracedRequest(0.0, 374, 44, model="qwen")
    assert TracedRequest.from_json(request.to_json()) == request


def test_a_model_that_is_no_name_is_an_error_with_its_line(tmp_path: Path) -> None:
    text = lines({"arrival_s": 5.0, "prompt_tokens": 374, "output_tokens": 44, "model": 7})
    with pytest.raises(ConfigError, match="line 1: model is 7, which is no name"):
        list(read_trace(written(tmp_path, text)))


@pytest.mark.parametrize("name", ["trace", "trace.csv", "trace.jsonl"])
def test_the_content_tells_the_format_and_not_the_name(tmp_path: Path, name: str) -> None:
    assert list(read_trace(written(tmp_path, AZURE, name))) == FROM_AZURE
    assert list(read_trace(written(tmp_path, gzip.compress(AZURE.encode()), name))) == FROM_AZURE


def test_azures_later_files_have_zones_and_may_have_more_columns_and_a_mark_in_front(tmp_path: Path) -> None:
    text = (
        "\ufeffTIMESTAMP,Kind,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,a,2162,5\n"
        "\n"
        "2024-05-10 02:00:01.009930+02:00,b,1,1\n"
    )
    assert list(read_trace(written(tmp_path, text))) == [
        TracedRequest(0.0, 2162, 5),
        TracedRequest(1.0, 1, 1),
    ]


def test_mooncakes_blocks_are_of_512_tokens_and_only_full_ones_count(tmp_path: Path) -> None:
    text = lines(
        {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [7, 8, 9]},
        {"timestamp": 3500, "input_length": 100, "output_length": 1},
    )
    assert list(read_trace(written(tmp_path, text))) == [
        TracedRequest(0.0, 1100, 52, (7, 8), 512),
        TracedRequest(0.5, 100, 1),
    ]


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = [TracedRequest(0.0, 200, 10, (5, -6, 1 << 63), 64), TracedRequest(0.25, 3, 0)]
    text = lines(*(each.to_json() for each in requests))
    assert list(read_trace(written(tmp_path, text))) == requests


def test_decisions_of_a_planner_are_the_traffic_that_it_measured(tmp_path: Path) -> None:
    text = (
        decided(requests=2, isl_tokens=100.4, osl_tokens=20)
        + decided()
        + decided(requests=None)
        + decided("a prompt that comes now waits for 3 s", requests=9, isl_tokens=100, osl_tokens=20)
        + "\n"
        + decided(requests=0, isl_tokens=None, osl_tokens=None)
        + decided(requests=2.0, interval_s=60.0, isl_tokens=50, osl_tokens=5)
    )
    assert list(read_trace(written(tmp_path, text))) == [
        TracedRequest(0.0, 100, 20),
        TracedRequest(15.0, 100, 20),
        TracedRequest(60.0, 50, 5),
    ]


def test_requests_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, recorded(5.0, 2.0, 2.5, 7.0, 3.0)))
    assert [each.arrival_s for each in requests] == [0.0, 0.5, 1.0, 3.0, 5.0]


def test_a_file_that_is_out_of_order_for_longer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REORDERED_REQUESTS", 100)
    path = written(tmp_path, recorded(*range(10, 111), 1.0))
    with pytest.raises(ConfigError, match="trace, line 102: arrived 9 s before"):
        list(read_trace(path))


def test_requests_with_many_blocks_are_put_in_order_over_fewer_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REORDERED_BLOCKS", 10)
    requests = [TracedRequest(float(number), 64, 1, (1, 2, 3, 4), 16) for number in range(5)]
    in_order = lines(*(each.to_json() for each in requests))
    assert list(read_trace(written(tmp_path, in_order))) == requests
    path = written(tmp_path, in_order + recorded(0.5))
    with pytest.raises(ConfigError, match=r"line 6: arrived 1\.5 s before"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty\n.*Azure CSV.*Mooncake.*recording"),
        ("hello\n", "line 1: 'hello' begins no known trace"),
        ('{"a": 1}\n', "line 1: .* begins no known trace"),
        (b"\x89PNG\r\n\x1a\n\xff\xff", "cannot read the trace"),
        (gzip.compress(AZURE.encode())[:-9], "cannot read the trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request\n.*Azure CSV with the columns"),
        (f"{AZURE}\nyesterday,1,1", "line 5: TIMESTAMP is 'yesterday', which is no date and time"),
        (f"{AZURE}\n2023-11-16 18:15:52,-1,1", "line 5: ContextTokens is '-1', which is no number of tokens"),
        (f"{AZURE}\n2023-11-16 18:15:52,1", "line 5: 2 columns where the header has 3"),
        (recorded(1.0) + "{", "line 2: .*\n.*dynaplan recording with arrival_s"),
        (recorded(1.0) + "[]", "line 2: a line that is no JSON object"),
        (recorded(1.0) + '{"arrival_s": 2, "prompt_tokens": 1}', "line 2: output_tokens is missing"),
        (recorded(1.0) + recorded(2.0).replace("2.0", "NaN"), "line 2: arrival_s is nan, which is no number"),
        (recorded(1.0) + recorded(2.0).replace('s": 1', 's": 1.5'), "line 2: prompt_tokens is 1.5"),
        (decided(requests=1) + "{}", "line 2: 'settings' is None: expected a JSON object"),
        (decided(requests=1) + decided(requests="many"), "line 2: 'requests' is 'many': expected a number"),
        (decided(requests=1) + decided(requests=-1), "line 2: the traffic is .*, which no interval has"),
        (decided(requests=1) + decided(requests=1e9), "line 2: the traffic is .*, which no interval has"),
        (decided(requests=1) + decided(requests=1, interval_s=0), "line 2: the traffic is"),
        (decided(requests=1, isl_tokens=-1), "line 1: the traffic is .*, which no interval has"),
        (
            recorded(1.0) + '{"arrival_s": 2, "prompt_tokens": 1, "output_tokens": 1, "block_hashes": [1]}',
            "line 2: block_tokens is missing",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_file_the_line_and_what_was_expected(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)
    assert "Expected" in caught.value.hint


def test_a_file_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no trace .*missing\.csv\n  Expected a file"):
        next(read_trace(tmp_path / "missing.csv"))


def test_memory_does_not_grow_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "REORDERED_REQUESTS", 500)

    def one_peak_bytes(requests: int) -> int:
        path = written(tmp_path, recorded(*range(requests)))
        # Tuples and floats that CPython keeps for reuse are not counted; a full collection gives them up.
        gc.collect()
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_trace(path)) == requests
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def peak_bytes(requests: int) -> int:
        """The least of several runs: other threads, as that of pytest-xdist, allocate when they like."""
        return min(one_peak_bytes(requests) for _ in range(3))

    one_peak_bytes(1000)  # what is made once, whoever comes first
    assert peak_bytes(8000) < 1.2 * peak_bytes(1000)


# -- blocks of another length ----------------------------------------------------------------------------


def test_a_long_block_is_several_short_ones_that_are_shared_whenever_it_is() -> None:
    one = TracedRequest(0.0, 1100, 1, (7, 8), 512).with_blocks_of(128)
    other = TracedRequest(0.0, 1500, 1, (7, 9), 512).with_blocks_of(128)
    assert (one.block_tokens, len(one.block_hashes)) == (128, 8)
    assert one.block_hashes[:4] == other.block_hashes[:4]
    assert not set(one.block_hashes[4:]) & set(other.block_hashes)
    assert len(set(one.block_hashes)) == 8


def test_several_short_blocks_are_a_long_one_that_is_shared_when_all_are() -> None:
    one = TracedRequest(0.0, 70, 1, (1, 2, 3, 4), 16).with_blocks_of(32)
    other = TracedRequest(0.0, 70, 1, (1, 2, 3, 5), 16).with_blocks_of(32)
    assert len(one.block_hashes) == 2
    assert one.block_hashes[0] == other.block_hashes[0]
    assert one.block_hashes[1] != other.block_hashes[1]


def test_blocks_that_do_not_divide_each_other_are_shared_as_far_as_is_known() -> None:
    one = TracedRequest(0.0, 100, 1, (1, 2), 48).with_blocks_of(32)
    other = TracedRequest(0.0, 100, 1, (1, 3), 48).with_blocks_of(32)
    assert [mine == others for mine, others in zip(one.block_hashes, other.block_hashes, strict=True)] == [
        True,
        False,
        False,
    ]


def test_a_request_without_blocks_or_with_the_right_ones_stays_as_it_is() -> None:
    for request in (TracedRequest(0.0, 100, 1), TracedRequest(0.0, 100, 1, (1,), 64)):
        assert request.with_blocks_of(64) is request


# -- the history of a trace ------------------------------------------------------------------------------


def test_an_interval_without_requests_is_in_the_history() -> None:
    trace = [TracedRequest(at_s, 100 * (1 + at_s), 10) for at_s in (0, 1, 25, 31)]
    assert interval_history(trace, 10) == [
        IntervalLoad(2, 150.0, 10.0),
        IntervalLoad(0, None, None),
        IntervalLoad(1, 2600.0, 10.0),
    ]


def test_the_unfinished_interval_is_in_it_only_when_there_is_no_other() -> None:
    assert interval_history([TracedRequest(3.0, 5, 6)], 10) == [IntervalLoad(1, 5.0, 6.0)]
    assert interval_history([], 10) == []


def test_the_guide_says_by_how_many_lines_a_trace_may_be_out_of_order() -> None:
    guide = Path(__file__).parents[4] / "docs/guides/forecasting.md"
    text = " ".join(guide.read_text(encoding="utf-8").split())
    assert f"out of order by up to {reading.REORDERED_REQUESTS:,} lines" in text


def dynamo(received_ms: int, **more: object) -> dict[str, object]:
    request = {"request_id": "r", "request_received_ms": received_ms, "output_tokens": 16, **more}
    replay = {"trace_block_size": 64, "input_length": 150, "input_sequence_hashes": [1 << 63, 5, 6]}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": received_ms + 1000,
        "request": {"replay": replay, **request},
    }


def test_dynamos_request_traces_are_read_without_the_block_that_is_not_full(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}
    no_hashes = dynamo(
        1_777_312_801_500, replay=None, input_tokens=9, request_received_ms=None, total_time_ms=500
    )
    text = lines(
        tool,
        dynamo(1_777_312_801_000),
        {"timestamp": 1, "event": dynamo(1_777_312_800_000)},
        no_hashes,
        dynamo(1_777_312_803_000, output_tokens=0),
    )
    assert list(read_trace(written(tmp_path, text))) == [
        TracedRequest(0.0, 150, 16, (1 << 63, 5), 64),
        TracedRequest(1.0, 150, 16, (1 << 63, 5), 64),
        TracedRequest(2.0, 9, 16),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_received_ms": "now"}, "request_received_ms is 'now', which is no number of seconds"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"replay": {"input_length": 3, "trace_block_size": 0}}, "trace_block_size is 0"),
        ({"replay": None}, "input_tokens is missing"),
    ],
)
def test_a_wrong_line_of_dynamos_is_told_by_its_number(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    text = lines(dynamo(1_000), dynamo(2_000, **change))
    with pytest.raises(ConfigError, match=f"line 2: {message}.*\n.*Dynamo's request trace"):
        list(read_trace(written(tmp_path, text)))


def test_a_directory_is_one_trace_of_all_its_shards(tmp_path: Path) -> None:
    written(tmp_path, lines(dynamo(5_000), dynamo(1_000)), "trace.000001.jsonl")
    written(tmp_path, gzip.compress(lines(dynamo(3_000), dynamo(7_000)).encode()), "trace.000002.jsonl.gz")
    written(tmp_path, "not a trace", "README.md")
    assert [each.arrival_s for each in read_trace(tmp_path)] == [0.0, 2.0, 4.0, 6.0]


def test_a_directory_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no trace\n.*\*\.jsonl"):
        list(read_trace(tmp_path))
