"""What is written is read again: by our readers, and by those of Dynamo's planner."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy
import pytest

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.lab.profiling.measurements import Measurements
from dynaplan.lab.profiling.recommendation import Recommendation
from dynaplan.lab.profiling.results import write_results
from dynaplan.planner.sizing.formula import DecodeInterpolator, PrefillInterpolator
from dynaplan.planner.sla_model import fit_tables, open_profile
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.known import TIMINGS, recommended, swept

TRUTH = TIMINGS["h200-bf16"]


def written(
    directory: Path, measured: Measurements, config: dict[str, dict[str, object]] | None = None
) -> tuple[Recommendation, list[Path]]:
    recommendation = recommended([measured], 200, 20)
    return recommendation, write_results(directory, recommendation, [measured], config or {})


def timing_in(directory: Path) -> StepTiming:
    return timing_for(SimOptions(profile=str(directory)))[0]


def test_the_files_are_those_of_the_profiler_s_layout(tmp_path: Path) -> None:
    _, files = written(tmp_path / "new" / "results", swept(TRUTH))
    names = {str(file.relative_to(tmp_path / "new" / "results")) for file in files}
    assert names == {
        "selected_prefill_interpolation/raw_data.npz",
        "selected_decode_interpolation/raw_data.npz",
        "prefill_raw_data.json",
        "decode_raw_data.json",
        "config_with_planner.yaml",
        "prefill_performance.svg",
        "decode_performance.svg",
        "cost_per_request.svg",
        "selected_prefill_interpolation/prefill_ttft_interpolation.svg",
        "selected_prefill_interpolation/prefill_throughput_interpolation.svg",
        "selected_decode_interpolation/decode_itl_interpolation.svg",
        "selected_decode_interpolation/decode_throughput_interpolation.svg",
    }
    assert all(file.is_file() for file in files)


def test_our_reader_gives_back_every_number(tmp_path: Path) -> None:
    recommendation, _ = written(tmp_path, swept(TRUTH))
    assert open_profile(str(tmp_path)) == recommendation.profile
    for half in ("prefill", "decode"):
        (tmp_path / f"selected_{half}_interpolation" / "raw_data.npz").unlink()
    assert open_profile(str(tmp_path)) == recommendation.profile


def test_the_archives_are_as_dynamo_s_planner_reads_them(tmp_path: Path) -> None:
    """It takes flat arrays of one length, and item 0 of ``max_kv_tokens``; from JSON, a whole number."""
    recommendation, _ = written(tmp_path, swept(TRUTH))
    points = len(recommendation.profile.z_itl)
    with numpy.load(tmp_path / "selected_decode_interpolation" / "raw_data.npz") as decode:
        assert decode["max_kv_tokens"].shape == (1,)
        shapes = {decode[key].shape for key in ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")}
    assert shapes == {(points,)}
    with numpy.load(tmp_path / "selected_prefill_interpolation" / "raw_data.npz") as prefill:
        assert set(prefill.files) == {"prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"}
    assert type(json.loads((tmp_path / "decode_raw_data.json").read_text())["max_kv_tokens"]) is int


def test_the_simulated_engine_takes_as_long_as_the_engine_that_was_swept(tmp_path: Path) -> None:
    written(tmp_path, swept(TRUTH))
    timing = timing_in(tmp_path)
    for isl in (450, 2900, 12_345):
        assert timing.prefill_ms(isl) == pytest.approx(TRUTH.prefill_ms(isl), rel=0.03)
    for decodes, context in ((1, 700), (60, 1100), (40, 4000), (10, 9000)):
        load = (decodes, float(decodes * context))
        assert timing.decode_ms(*load) == pytest.approx(TRUTH.decode_ms(*load), rel=0.05)


def test_the_formulas_of_the_planner_take_the_profile(tmp_path: Path) -> None:
    written(tmp_path, swept(TRUTH))
    tables = fit_tables(open_profile(str(tmp_path)), "written")
    prefill, decode = PrefillInterpolator(tables.prefill), DecodeInterpolator(tables.decode)
    assert prefill.ttft_ms(5000) == pytest.approx(TRUTH.prefill_ms(5000), rel=0.01)
    assert decode.itl_ms(60, 3000) == pytest.approx(TRUTH.decode_ms(60, 180_000), rel=0.1)
    best = decode.find_best_throughput_per_gpu(12.0, 3250)
    assert best.itl_ms <= 12.0
    assert best.tokens_per_s_per_gpu == pytest.approx(
        best.kv_usage * 400_000 / 3250 * 1000 / best.itl_ms, rel=0.1
    )


def test_a_small_sweep_makes_a_profile_too(tmp_path: Path) -> None:
    """Four prompt lengths and two contexts with two loads each."""
    recommendation, _ = written(tmp_path, swept(TRUTH, prefill_granularity=3, decode_granularity=1))
    assert recommendation.notes == ()
    assert timing_in(tmp_path).prefill_ms(3000) == pytest.approx(TRUTH.prefill_ms(3000), rel=0.01)
    fit_tables(open_profile(str(tmp_path)), "small")


def test_every_picture_is_a_drawing_with_points(tmp_path: Path) -> None:
    _, files = written(tmp_path, swept(TRUTH))
    drawn = [file for file in files if file.suffix == ".svg"]
    assert len(drawn) == 7
    for file in drawn:
        picture = ElementTree.parse(file).getroot()
        assert picture.findall(".//{*}circle[@class]")


def test_a_directory_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-dir: .*file cannot be written"):
        written(tmp_path / "file", swept(TRUTH))


def test_the_configuration_names_the_profile_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("results"), swept(TRUTH))
    text = (tmp_path / "results" / "config_with_planner.yaml").read_text()
    assert f"profile-results-dir: {tmp_path / 'results'}\n" in text
