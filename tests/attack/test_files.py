"""Whatever stands in a file that dynaplan reads, the answer is a value or a sentence, never a traceback."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.yaml_file import read_sections, read_sections_file
from dynaplan.engines.sim.profiles import SHIPPED_DIR, load_profile
from dynaplan.fleet.gpu_claims import NodeClaims, live_claim_owners
from dynaplan.fleet.rules import statefile
from dynaplan.fleet.startup_times import FILE_NAME, StartupTimesFile, median_startup_s
from dynaplan.planner.recorders.decision_log import read_all, read_records
from dynaplan.planner.replay import replay
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.port_leases import lease_ports
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.util.errors import StatefileCorrupt, UserError
from tests.attack.fuzzing import bytes_of, json_text, mutated, text_of, total

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures"
REAL_STATEFILES = [REPOSITORY / "statefiles" / name for name in ("worker_added.json", "failed.json")]
PROFILE = next(path for path in sorted(SHIPPED_DIR.glob("*.json")) if "8B" in path.name)
GRAPH = REPOSITORY / "graphs" / "disagg.yaml"


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dp-fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def is_said(read: Callable[[], Any]) -> bool:
    """Read; True when a user was told in a sentence what is wrong."""
    try:
        read()
    except UserError as error:
        assert 0 < len(str(error)) < 3000
        return True
    return False


@pytest.mark.parametrize("path", REAL_STATEFILES, ids=lambda path: path.stem)
@total
@given(data=st.data())
def test_a_statefile_is_read_whole_or_is_corrupt(path: Path, data: st.DataObject) -> None:
    text = json_text(json.loads(path.read_text()), data.draw)
    try:
        document = statefile.from_json(text)
    except StatefileCorrupt as error:
        assert len(str(error)) < 1000
        return
    for worker in statefile.fleet_of(document):
        assert min(worker.pid, worker.started_at, worker.instance_id, worker.failures) >= 0
        assert all(map(math.isfinite, (worker.since_s, worker.retry_at_s, worker.gpu_share)))
        assert all(map(math.isfinite, worker.restarts_s))
    statefile.inventory_of(document)
    statefile.arbiter_of(document)
    statefile.planner_keys_of(document)
    statefile.live_settings_of(document)
    statefile.from_json(statefile.to_json(document))


def smaller(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile with few points, so that a mutation meets every field."""
    return {key: value[:4] if isinstance(value, list) else value for key, value in profile.items()}


@total
@given(data=st.data())
def test_a_profile_of_json_is_usable_or_refused(data: st.DataObject) -> None:
    with directory() as at:
        file = at / "profile.json"
        text = json_text(smaller(json.loads(PROFILE.read_text())), data.draw)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))

        def read() -> None:
            timing = load_profile(str(file)).timing()
            assert timing is not None

        is_said(read)


ARRAYS: dict[str, Any] = {
    "prefill_isl": [100.0, 200.0, 400.0],
    "prefill_ttft": [10.0, 20.0, 40.0],
    "prefill_thpt_per_gpu": [9.0, 9.0, 9.0],
    "x_kv_usage": [0.1, 0.2],
    "y_context_length": [100.0, 100.0],
    "z_itl": [5.0, 6.0],
    "z_thpt_per_gpu": [5.0, 6.0],
    "max_kv_tokens": [10000],
}


def archive(arrays: Mapping[str, Any]) -> bytes:
    held = io.BytesIO()
    numpy.savez(held, allow_pickle=True, **{key: numpy.array(value) for key, value in arrays.items()})
    return held.getvalue()


@total
@given(data=st.data())
def test_a_profile_of_archives_is_usable_or_refused(data: st.DataObject) -> None:
    arrays = {key: value for key, value in ARRAYS.items() if data.draw(st.integers(0, 9))}
    odd = st.sampled_from(
        [
            [],
            [[1.0, 2.0], [3.0, 4.0]],
            5,
            ["a"],
            [None],
            [[[1]]],
            [float("nan")] * 3,
            [1e308] * 3,
            [-1.0, 0.0],
        ]
    )
    if data.draw(st.booleans()):
        arrays[data.draw(st.sampled_from([*ARRAYS, "tp"]))] = data.draw(odd)
    raw = archive(arrays)
    if data.draw(st.booleans()):
        raw = bytes_of(raw, data.draw)
    early = data.draw(st.booleans())
    with directory() as at:
        if early:
            (at / "decode_tp1_interpolation").mkdir()
            (at / "decode_tp1_interpolation" / "decode_tp1_data.npz").write_bytes(raw)
            results = (
                at / "prefill_tp1_interpolation" / f"gap_isl{data.draw(st.sampled_from(['1', 'x', '']))}"
            )
            results.mkdir(parents=True)
            result = json_text({"time_to_first_token": {"avg": 5.0}}, data.draw)
            text = result.encode("utf-8", "surrogatepass")
            (results / "profile_export_genai_perf.json").write_bytes(text)
        else:
            (at / "prefill.npz").write_bytes(raw)
            (at / "decode.npz").write_bytes(archive(ARRAYS))
        is_said(lambda: load_profile(str(at)).timing())


AZURE = (FIXTURES / "traces" / "azure_conv.csv").read_text()[:600]
MOONCAKE = '{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}\n' * 3
RECORDING = (
    '{"arrival_s":0.5,"prompt_tokens":128,"output_tokens":5,"block_hashes":[1,2],"block_tokens":64}\n' * 3
)


DECISIONS = (
    '{"wall_time":"","settings":{"adjustment-interval":30},"observation":{"traffic":{"interval_s":30.1,'
    '"requests":2,"isl_tokens":10.5,"osl_tokens":null}},"decision":{}}\n' * 3
)


@pytest.mark.parametrize(
    "real",
    [AZURE, MOONCAKE, RECORDING, DECISIONS],
    ids=["azure", "mooncake", "recording", "decisions"],
)
@total
@given(data=st.data())
def test_a_trace_is_read_or_named_with_its_line(real: str, data: st.DataObject) -> None:
    text = text_of(text_of(real, data.draw), data.draw).encode("utf-8", "surrogatepass")

    def read() -> None:
        for request in read_trace(at / "trace"):
            assert math.isfinite(request.arrival_s)
            assert min(request.prompt_tokens, request.output_tokens) >= 0

    with directory() as at:
        (at / "trace").write_bytes(text if data.draw(st.integers(0, 5)) else b"\x1f\x8b" + text)
        is_said(read)


@total
@given(data=st.data())
def test_a_decision_log_is_read_and_one_that_is_none_is_refused(data: st.DataObject) -> None:
    lines = [json_text({"decision": {"id": 1}, "trail": [{"stage": "x"}]}, data.draw) for _ in range(2)]
    with directory() as at:
        file = at / "decisions.jsonl"
        file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        assert all(isinstance(record, dict) for record in read_records(at, 9))
        is_said(lambda: list(read_all(file)))
        is_said(lambda: replay(file, {}))


@total
@given(data=st.data())
def test_a_configuration_is_sections_or_an_error_with_its_line(data: st.DataObject) -> None:
    text = text_of(text_of(GRAPH.read_text(), data.draw), data.draw)

    def read() -> None:
        sections = read_sections(text, "x.yaml")
        assert all(isinstance(name, str) and isinstance(body, dict) for name, body in sections.items())

    is_said(read)
    with directory() as at:
        (at / "x.yaml").write_bytes(bytes_of(GRAPH.read_bytes(), data.draw))
        is_said(lambda: read_sections_file(at / "x.yaml"))


@total
@given(data=st.data())
def test_start_up_times_are_read_or_forgotten(data: st.DataObject) -> None:
    with directory() as at:
        text = json_text({'["sim","m",1]': [1.5, 2.5]}, data.draw)
        (at / FILE_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
        times = StartupTimesFile(at)
        for key in times.read():
            usual = median_startup_s(times.read(), key)
            assert usual is None or (math.isfinite(usual) and usual >= 0)
        times.learn("k", 1.0)
        assert times.read()["k"] == [1.0]


def own_claim() -> dict[str, Any]:
    return {"uuid": "GPU-1", "namespace": "ns", "uid": os.getuid(), "pid": 1, "started_at": 5, "boot_id": "b"}


@total
@given(data=st.data())
def test_a_claim_on_a_gpu_that_cannot_be_read_is_none(data: st.DataObject) -> None:
    with directory() as at:
        text = json_text(own_claim(), data.draw).encode("utf-8", "surrogatepass")
        (at / f"GPU-1.{os.getuid()}.json").write_bytes(text)
        (at / "x").write_bytes(text)
        claims = NodeClaims(ProcessIdentity(os.getpid(), 1, "boot"), "ns", at)
        foreign = claims.held_by_others(["GPU-1"])
        live_claim_owners(at)
        assert claims.claim(["GPU-1"]) == {"GPU-1"} - foreign.keys()
        claims.release(["GPU-1"])


@total
@given(
    names=st.lists(st.text("port.lock-0123456789x", min_size=1, max_size=12), max_size=4), text=st.binary()
)
def test_ports_are_leased_whatever_lies_beside_the_leases(names: list[str], text: bytes) -> None:
    with directory() as at:
        for name in names:
            if name not in (".", ".."):
                (at / name).write_bytes(text)
        with lease_ports(1, at) as lease:
            assert len(lease.ports) == 1


def test_a_mutation_keeps_what_it_does_not_touch() -> None:
    assert mutated({}, lambda _: 5) == 5
