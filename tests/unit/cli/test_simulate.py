"""``dynaplan simulate`` as a user types it."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli import simulate as simulate_command
from dynaplan.cli.simulate import command
from dynaplan.config.settings.worker import DEFAULT_PROFILE
from dynaplan.engines.sim.profiles import SHIPPED_DIR
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import recommend_policy, run_simulations
from dynaplan.util.errors import ConfigError
from dynaplan.util.progress import ProgressLine

LOAD = "constant:rate=4,duration=60,isl=1000,osl=50"


def simulate(*arguments: str) -> str:
    result = CliRunner().invoke(
        command, ["--trace", LOAD, *arguments], catch_exceptions=False, standalone_mode=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_policies_are_compared_side_by_side_on_the_same_trace(tmp_path):
    path = tmp_path / "results.json"

    text = simulate(
        "--policy", "load", "--policy", "static:1,2", "--policy", "static:2,2", "--json", str(path)
    )

    assert [line.split()[0] for line in text.splitlines()] == ["POLICY", "load", "static:1,2", "static:2,2"]
    rows = json.loads(path.read_text())
    assert len({row["requests"] for row in rows}) == 1
    assert all(row["lost"] == 0 for row in rows)
    assert rows[1]["gpu_hours"] == pytest.approx(3 / 60, rel=0.02)


def test_only_the_end_of_a_trace_counts(tmp_path):
    path = tmp_path / "results.json"

    simulate("--policy", "static:1,1", "--last", "15", "--json", str(path))

    assert json.loads(path.read_text())[0]["requests"] == pytest.approx(15 * 4, abs=1)


def test_a_recommendation_compares_the_graphs_policy_with_others_and_says_which(tmp_path):
    path = tmp_path / "results.json"

    text = simulate("--recommend", "--mode", "agg", "--json", str(path))

    rows = json.loads(path.read_text())
    policies = [row["policy"] for row in rows]
    assert policies[:3] == ["load", "sla", "best-static:1"]
    assert "load --VllmWorker.max-num-batched-tokens=4096" in policies[3:]
    assert text.splitlines()[-1].startswith("Recommended: stay with load: 100.0% in time")
    assert rows[0]["recommended"] in text.replace("\n  ", " ") and "recommended" not in rows[1]


def test_each_recommended_policy_is_simulated_as_it_would_be_served():
    load = "poisson:rate=30,duration=60,isl=3000,osl=20"
    options = SimulateOptions(load, policies=("load", "sla", "best-static"), gpus=2)

    queued = {each.policy: each.outcome.queued_ms.percentile(5) for each in recommend_policy(options).results}

    # With as many workers throughout, only a deadline lets late prompts wait for those that come in time.
    assert queued["sla"] < queued["load"] / 2
    assert queued["best-static:1,1"] == pytest.approx(queued["load"])


def test_the_same_command_twice_prints_the_same():
    assert simulate("--policy", "sla", "--mode", "agg") == simulate("--policy", "sla", "--mode", "agg")


def test_options_of_the_planner_and_the_engine_are_taken(tmp_path):
    path = tmp_path / "results.json"

    simulate(
        "--start",
        "2,3",
        "--json",
        str(path),
        "--Planner.adjustment-interval=10",
        "--VllmWorker.max-num-seqs=64",
    )

    assert json.loads(path.read_text())[0]["scale_events"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "magic"],
        ["--policy", "load,sla"],
        ["--policy", "formula:4"],
        ["--policy", "sla", "--gpus", "1"],
        ["--policy", "best-static", "--gpus", "1"],
        ["--policy", "best-static:2,1"],
        ["--policy", "static:2,2", "--gpus", "3"],
        ["--policy", "load", "--gpus", "4", "--start", "2,3"],
        ["--html", "no/such/directory/page.html"],
        ["--Planner.router=clever"],
        ["--policy", "static"],
        ["--policy", "static:1", "--mode", "disagg"],
        ["--policy", "static:1,2", "--mode", "agg"],
        ["--start", "many"],
        ["--start", "1,0"],
        ["--policy", "static:1,0"],
        ["--policy", "static:0", "--mode", "agg"],
        ["--profile", "no-such-profile"],
        ["--trace", "no-such-file.csv"],
        ["--trace", "sinusoid:hight=3"],
        ["--router", "clever"],
        ["--rate-scale", "0"],
        ["--Planner.adjustment-intervall=10"],
        ["--Fronted.port=1"],
        ["--VllmWorker.max-prefill-queue-size=many"],
        ["--PrefillWorker.max-concurrent-prefills=0"],
    ],
    ids=" ".join,
)
def test_wrong_input_is_refused_before_anything_is_simulated(arguments):
    with pytest.raises(ConfigError):
        simulate(*arguments)


def test_the_best_static_split_has_a_row_and_says_whether_it_keeps_the_promise(tmp_path):
    path, page = tmp_path / "results.json", tmp_path / "page.html"
    written = ("--json", str(path), "--html", str(page))

    text = simulate("--policy", "static:2,2", "--policy", "best-static", *written)

    static, best = json.loads(path.read_text())
    assert best["policy"] == "best-static:1,1"
    assert best["gpu_hours"] == pytest.approx(static["gpu_hours"] / 2)
    assert best["note"].startswith("best-static: 1,1 has the fewest GPU-hours of the splits that keep")
    assert best["note"] in text.replace("\n  ", " ") and "note" not in static
    assert best["note"] in page.read_text() and "best-static:1,1" in page.read_text()


def test_the_best_static_split_goes_by_the_planners_promise():
    load = ("--trace", "constant:rate=40,duration=20,isl=3000,osl=20", "--gpus", "2", "--ttft", "5000")

    def text(*arguments: str) -> str:
        return simulate(*load, "--policy", "best-static", *arguments).replace("\n  ", " ")

    assert "with 2 GPUs no split keeps the promise" in text()
    promise = ("--Planner.ttft-percentile=20", "--Planner.itl-percentile=20")
    assert "that keep the promise (TTFT for 20 %, ITL for 20 % of the requests)" in text(*promise)


def test_a_graphs_file_gives_the_options_of_engine_and_planner(tmp_path):
    file = tmp_path / "graph.yaml"
    file.write_text(
        "Common: {speedup-ratio: 0.1}\n"
        "VllmWorker: {common-configs: [speedup-ratio], max-num-seqs: 64}\n"
        "Planner: {backend: vllm, policy: sla, itl: 30}\n"
    )
    quick, slow = tmp_path / "quick.json", tmp_path / "slow.json"

    simulate("--policy", "load", "--json", str(quick))
    simulate("-f", str(file), "--policy", "load", "--json", str(slow))

    [before], [after] = json.loads(quick.read_text()), json.loads(slow.read_text())
    assert after["itl_p50_ms"] > 8 * before["itl_p50_ms"]
    assert after["itl_slo"] == 0


def test_options_that_mean_nothing_in_virtual_time_are_refused():
    with pytest.raises(ConfigError, match="speedup-ratio"):
        simulate("--VllmWorker.speedup-ratio=0")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--policy", "sal"], "Did you mean 'sla'?"),
        (["--policy", "statik:1,2"], "Did you mean 'static'?"),
        (["--trace", "sinus:low=1"], "Did you mean 'sinusoid'?"),
        (["--trace", "poison"], "Did you mean 'poisson'?"),
        (["--trace", "xyzzy"], "There is no file 'xyzzy' either."),
        (["--trace", "wave:x=1"], "ramp, step, sinusoid"),
        (["-f", "disag.yaml"], "Did you mean 'disagg.yaml'?"),
    ],
    ids=" ".join,
)
def test_a_misspelt_name_is_answered_with_the_nearest(arguments, meant):
    with pytest.raises(ConfigError) as raised:
        simulate(*arguments)
    assert meant in str(raised.value)


def test_a_shipped_graphs_file_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "load" in simulate("-f", "disagg.yaml")


def test_a_trace_without_suffix_is_a_file_when_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").write_text("nothing")
    with pytest.raises(ConfigError, match="begins no known trace"):
        simulate("--trace", "trace")


def test_the_progress_tells_policy_simulated_time_and_time_left(monkeypatch):
    now_s, shown = [0.0], io.StringIO()
    monkeypatch.setattr(simulate_command.time, "monotonic", lambda: now_s[0])
    line = ProgressLine(shown, 0.0, lambda: now_s[0])
    watch = simulate_command._watcher(2, line)
    for passed_s, call in (
        (0.0, ("load", 1, 0.0, 100.0)),
        (10.0, ("load", 1, 25.0, 100.0)),
        (0.5, ("best-static", 1, 0.0, 100.0)),
        (0.5, ("best-static", 2, 50.0, 100.0)),
        (0.5, ("best-static", 3, 0.0, 0.0)),
    ):
        now_s[0] += passed_s
        watch(*call)
    assert shown.getvalue().splitlines() == [
        "policy 1 of 2, load, 0% of 01:40 simulated",
        "policy 1 of 2, load, 25% of 01:40 simulated, about 00:30 left",
        "policy 2 of 2, best-static, split 1, 0% of 01:40 simulated",
        "policy 2 of 2, best-static, split 2, 50% of 01:40 simulated",
        "policy 2 of 2, best-static, split 3, simulating",
    ]


def test_every_policy_and_pass_is_told_up_to_the_traces_end():
    calls = []
    options = SimulateOptions(LOAD, policies=("static:1,1", "load"))
    list(run_simulations(options, lambda *call: calls.append(call)))
    assert {(name, number) for name, number, _, _ in calls} == {("static:1,1", 1), ("load", 1)}
    assert all(0 <= at_s <= length_s == pytest.approx(60, abs=1) for _, _, at_s, length_s in calls)


def test_the_policy_is_the_graphs_unless_one_is_given(tmp_path):
    file = tmp_path / "graph.yaml"
    file.write_text("VllmWorker: {remote-prefill: true}\nPlanner: {policy: sla}\n")

    assert simulate("-f", str(file)).splitlines()[1].split()[0] == "sla"
    assert simulate("-f", str(file), "--policy", "load").splitlines()[1].split()[0] == "load"
    assert simulate("--Planner.policy=both").splitlines()[1].split()[0] == "both"
    assert simulate().splitlines()[1].split()[0] == "load"


def test_a_seed_is_of_made_up_load_too(tmp_path):
    def requests(*arguments: str) -> int:
        path = tmp_path / "results.json"
        simulate("--trace", "poisson:rate=5,duration=20", "--json", str(path), *arguments)
        return json.loads(path.read_text())[0]["requests"]

    assert requests("--seed", "2") == requests("--trace", "poisson:rate=5,duration=20,seed=2")
    assert len({requests("--seed", str(seed)) for seed in (1, 2, 3)}) > 1


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--VllmWorker.tensor-parallel-size=2"], "measured with tensor-parallel-size 1: a worker of 2 GPUs"),
        ([], ""),
        (["--VllmWorker.model=70b", "--VllmWorker.tensor-parallel-size=4"], ""),
    ],
)
def test_gpus_that_the_profile_does_not_time_are_warned_about(arguments, warned):
    result = CliRunner().invoke(command, ["--trace", LOAD, "--policy", "static:1,1", *arguments])

    assert bool(result.stderr) == bool(warned)
    assert warned in result.stderr


def test_an_estimated_profile_is_told_below_the_table(tmp_path):
    shipped = json.loads((SHIPPED_DIR / f"{DEFAULT_PROFILE}.json").read_text())
    profile = tmp_path / "estimated.json"
    profile.write_text(json.dumps({**shipped, "origin": "estimated, not measured: by hand"}))
    text = simulate("--policy", "static:1,2", "--profile", str(profile))
    assert text.splitlines()[-1] == "The profile is estimated, not measured: by hand."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "sla", "--ttft", "800"), "by deadline, 800 ms (Planner.ttft)"),
        (("--policy", "static:1,1", "--policy", "formula"), "by deadline, 500 ms (Planner.ttft)"),
        (("--policy", "static:1,1", "--Planner.policy=sla"), "by deadline, 500 ms (Planner.ttft)"),
        (("--VllmWorker.prefill-deadline=900",), "by deadline, 900 ms (prefill-deadline)"),
        (("--policy", "sla", "--VllmWorker.prefill-deadline=0"), ""),
        (("--policy", "sla", "--mode", "agg"), ""),
        (("--policy", "load"), ""),
    ],
)
def test_queued_prompts_go_by_the_target_that_is_planned_for_as_in_serve(arguments, said):
    assert (said in simulate(*arguments)) if said else ("by deadline" not in simulate(*arguments))


def test_the_order_of_queued_prompts_is_the_one_that_is_told(tmp_path):
    late = ("--trace", "constant:rate=16,duration=30,isl=3000,osl=20")

    def met(*arguments: str) -> float:
        path = tmp_path / "results.json"
        simulate(
            "--policy",
            "static:1,2",
            *late,
            "--PrefillWorker.max-concurrent-prefills=1",
            *arguments,
            "--json",
            str(path),
        )
        return float(json.loads(path.read_text())[0]["ttft_slo"])

    by_target = met("--Planner.policy=sla")
    assert by_target == met("--VllmWorker.prefill-deadline=500")
    assert by_target > met()


def test_the_planner_of_a_model_beside_others_is_not_simulated_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("Models: {ant: {engine: sim, memory: 5GB, Planner: {}}, bee: {engine: sim, memory: 5GB}}")
    words = ["-f", str(file), "--trace", "agents:duration=60", "--gpus", "1"]
    result = CliRunner().invoke(command, words, obj=[])
    assert result.exit_code == 0, result.output
    assert "the workers of ant follow their requests here" in result.stderr
