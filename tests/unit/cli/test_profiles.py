"""``dynaplan profiles`` lists, shows and exports what planners have learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.profiles import command
from dynaplan.cli.simulate import command as simulate
from dynaplan.engines.sim.profiles import load_profile
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepLine, describe
from dynaplan.planner.learnt_files import LearntOf, learnt_dir, write_file
from dynaplan.util.errors import ConfigError

LINE = StepLine(9.0, 0.2, 1e-4, 0.05, 2.0)
KNOWN = LearntTiming(
    LINE, LINE, 0.04, 0.3, equations=60, steps=9253, largest_batch=8, kv_tokens=32_000, request_slots=16
)
KEPT = LearntOf("llamacpp", "1.0", "/models/tiny.gguf", "7ab1", {"parallel": 8}, "a box", 1, "decode")
NAME = Path(KEPT.file_name).stem


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_file(learnt_dir({"HOME": str(tmp_path)}), KEPT, KNOWN)


def run(*words: str) -> str:
    return CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False).output


def test_each_is_listed_with_engine_model_steps_and_error() -> None:
    heads, line = run().splitlines()
    assert heads.split()[0] == "NAME"
    assert line.startswith(NAME)
    assert {"llamacpp", "9,253", "4%"} <= set(line.split())
    (document,) = json.loads(run("--json"))
    assert (document["name"], document["known"]) == (NAME, describe(KNOWN))


def test_where_nothing_is_kept_the_list_says_what_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert "--Planner.policy=sla" in run()


def test_one_is_shown_by_the_beginning_of_its_name_and_drawn(tmp_path: Path) -> None:
    shown = run("show", "llamacpp-tiny", "--svg", str(tmp_path / "step.svg"))
    assert describe(KNOWN) in shown
    assert "32,000 tokens" in shown
    drawn = (tmp_path / "step.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("learnt", "seen", "+4%", "-4%", "most that was seen"))


def test_an_exported_one_is_read_as_a_profile_with_the_learnt_times(tmp_path: Path) -> None:
    run("export", NAME, str(tmp_path / "out"))
    profile = load_profile(str(tmp_path / "out"))
    timing = profile.timing()
    assert profile.origin == describe(KNOWN)
    for batch, context in ((1, 64), (4, 1000), (8, 500), (16, 1500)):
        learnt_ms = KNOWN.decode_ms(batch, batch * context)
        assert timing.decode_ms(batch, batch * context) == pytest.approx(learnt_ms, rel=0.03)
    for tokens in (64, 1000, 20_000):
        assert timing.prefill_ms(tokens) == pytest.approx(KNOWN.timing().prefill_ms(tokens), rel=0.001)


@pytest.mark.parametrize("name", ["learnt", f"learnt:{NAME}"])
def test_a_simulation_is_timed_by_what_was_learnt(name: str) -> None:
    told = simulated("--profile", name)
    assert f"The profile is {describe(KNOWN)}." in " ".join(told.split())


def test_a_simulation_of_a_model_of_which_nothing_was_learnt_says_so() -> None:
    with pytest.raises(ConfigError, match=r"nothing was learnt of ant\.gguf"):
        simulated("--profile", "learnt", "--VllmWorker.model=ant.gguf")


def simulated(*words: str) -> str:
    arguments = [
        "--trace",
        "poisson:rate=1,duration=20,isl=100,osl=10",
        "--policy",
        "static:1",
        "--mode",
        "agg",
    ]
    return (
        CliRunner()
        .invoke(simulate, [*arguments, *words], catch_exceptions=False, standalone_mode=False, obj=[])
        .output
    )


def test_an_engine_that_does_not_tell_its_kv_cache_needs_its_size(tmp_path: Path) -> None:
    write_file(learnt_dir({"HOME": str(tmp_path)}), KEPT, LearntTiming(LINE, LINE, 0.04, equations=60))
    with pytest.raises(ConfigError, match="KV cache"):
        run("export", NAME, str(tmp_path / "out"))
    run("export", NAME, str(tmp_path / "out"), "--max-kv-tokens", "4000")
    assert load_profile(str(tmp_path / "out")).max_kv_tokens == 4000


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody"):
        run("show", "nobody")
