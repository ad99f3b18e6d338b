"""What ``serve`` finds out, and fills in, about engines and their models before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.cli.main import main
from dynaplan.cli.serve_checks import check_memory, check_settings, locate_models
from dynaplan.config.model_entries import with_worker_sections
from dynaplan.config.settings.worker import SimOptions
from dynaplan.contract.gpus import Gpu
from dynaplan.engines import registry
from dynaplan.engines.model_memory import MemoryNeed
from dynaplan.graph.config import resolve_graph
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.memory import BoxMemory
from dynaplan.sdk import Graph, load_graph
from dynaplan.util.errors import ConfigError, all_faults
from tests.unit.engines.test_gguf import GOOD, written

Config = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def disagg() -> Graph:
    return load_graph("graphs.disagg:Frontend", Path(graphs.__file__).parents[1])


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, float]]:
    """What ``check_engine`` was asked: engine, model, GPUs; it refuses nothing."""
    asked: list[tuple[str, Any, float]] = []

    def check(name: str, options: Any, gpus: float) -> list[str]:
        asked.append((name, options.get("model"), gpus))
        return [f"{name} is only looked at"]

    monkeypatch.setattr(registry, "check_engine", check)
    return asked


def both(**options: Any) -> Config:
    keys = {key.replace("_", "-"): value for key, value in options.items()}
    return {"VllmWorker": dict(keys), "PrefillWorker": dict(keys)}


def check(graph: Graph, config: Config) -> list[str]:
    with all_faults() as faults:
        return check_settings(graph, resolve_graph(graph, config), config, faults)


# -- checking ------------------------------------------------------------------------------------------


def test_each_worker_service_is_checked_with_its_gpus(
    disagg: Graph, checked: list[tuple[str, Any, float]]
) -> None:
    config = both(engine="vllm", model="m")
    config["VllmWorker"]["ServiceArgs"] = {"resources": {"gpu": 2}}
    config["PrefillWorker"]["ServiceArgs"] = {"resources": {"gpu": 0.5}}
    warnings = check(disagg, config)
    assert sorted(checked) == [("vllm", "m", 0.5), ("vllm", "m", 2)]
    assert sorted(warnings) == [
        "PrefillWorker: vllm is only looked at",
        "VllmWorker: vllm is only looked at",
    ]


def test_snake_case_and_null_and_common_are_seen_as_the_worker_will(
    disagg: Graph, checked: list[tuple[str, Any, float]]
) -> None:
    common = {"engine": "vllm", "model": "m"}
    section = {"common_configs": ["engine", "model"]}
    check(disagg, {"Common": common, "VllmWorker": section, "PrefillWorker": section})
    check(disagg, {"VllmWorker": {"engine": None}})
    assert [name for name, _, _ in checked] == ["vllm", "vllm", "sim", "sim"]


@pytest.mark.parametrize(
    ("key", "decode", "prefill"),
    [
        ("engine", "llamacpp", "sim"),
        ("model", "/a.gguf", "/b.gguf"),
        ("served-model-name", "a", None),
        ("max-num-seqs", 4, 2),
    ],
)
def test_both_sides_of_a_hand_off_have_one_engine_and_one_model(
    disagg: Graph, checked: list[tuple[str, Any, float]], key: str, decode: object, prefill: object
) -> None:
    config = both(engine="llamacpp", model="/a.gguf")
    config["VllmWorker"][key] = decode
    config["PrefillWorker"][key] = prefill
    with pytest.raises(ConfigError, match=f"VllmWorker.{key} is {decode!r}, but PrefillWorker.{key} is") as e:
        check(disagg, config)
    assert f"--Common.{key}=" in e.value.hint


def test_simulated_engines_need_not_agree(disagg: Graph) -> None:
    assert check(disagg, {"VllmWorker": {"model": "a"}, "PrefillWorker": {"model": "b"}}) == []


def test_a_wrong_option_names_the_service(disagg: Graph) -> None:
    with pytest.raises(ConfigError, match=r"PrefillWorker: jitter is 3"):
        check(disagg, {"PrefillWorker": {"jitter": 3}})


@pytest.mark.parametrize(
    ("option", "value"), [("router", "clever"), ("prometheus-endpoint", "nowhere"), ("slo-window", -1)]
)
def test_what_the_planner_would_refuse_is_refused_before_anything_starts(
    disagg: Graph, option: str, value: object
) -> None:
    planner = {"policy": "sla", "profile-results-dir": "mocker", option: value}
    with pytest.raises(ConfigError, match=rf"Planner\.{option}(:| is) {value!r}"):
        check(disagg, {"Planner": planner})


def test_a_planner_that_counts_a_model_that_no_frontend_serves_is_refused(disagg: Graph) -> None:
    config = {
        "Common": {"model": "meta/llama"},
        "Frontend": {"served_model_name": "llama"},
        "Planner": {"policy": "sla", "profile-results-dir": "mocker", "served_model_name": "lama"},
    }
    with pytest.raises(
        ConfigError, match=r"Planner\.served-model-name is 'lama', and no frontend"
    ) as refused:
        check(disagg, config)
    assert refused.value.hint == f"Leave it out, or write one of: llama, meta/llama, {SimOptions.model}."
    config["Planner"]["policy"] = "load"
    assert check(disagg, config) == []


@pytest.mark.parametrize("name", ["Meta/Llama", "llama", "adapter"])
def test_a_planner_counts_a_model_by_any_name_that_clients_may_call_it(
    disagg: Graph, checked: list[tuple[str, Any, float]], name: str
) -> None:
    config = both(
        engine="vllm", model="meta/llama", served_model_name="llama", lora_modules=["adapter=a/path"]
    )
    config["Planner"] = {"policy": "sla", "profile-results-dir": "mocker", "served-model-name": name}
    assert all("vllm is only looked at" in warning for warning in check(disagg, config))


def test_a_recording_needs_a_directory_that_is_there(disagg: Graph, tmp_path: Path) -> None:
    assert check(disagg, {"Frontend": {"record-traffic": str(tmp_path / "traffic.jsonl")}}) == []
    for path in (tmp_path, tmp_path / "nowhere" / "traffic.jsonl"):
        with pytest.raises(ConfigError, match=r"Frontend: record-traffic is"):
            check(disagg, {"Frontend": {"record-traffic": str(path)}})
    assert list(tmp_path.iterdir()) == []


def test_a_planner_of_a_cluster_is_remarked_upon(disagg: Graph) -> None:
    (warning,) = check(disagg, {"Planner": {"environment": "kubernetes"}})
    assert "it scales this box" in warning


# -- locating ------------------------------------------------------------------------------------------


def test_a_relative_model_of_common_is_absolute_for_every_worker(disagg: Graph, tmp_path: Path) -> None:
    config: Config = {"Common": {"engine": "llamacpp", "model": "m.gguf"}}
    for name in ("VllmWorker", "PrefillWorker"):
        config[name] = {"common-configs": ["engine", "model"]}
    located = locate_models(disagg, config, tmp_path)
    for name in ("VllmWorker", "PrefillWorker"):
        assert located[name]["model"] == str(tmp_path / "m.gguf")
        assert located[name]["served-model-name"] == "m"
    assert config["VllmWorker"] == {"common-configs": ["engine", "model"]}


@pytest.mark.parametrize("section", ["Frontend", "Common"])
def test_workers_answer_to_the_name_that_the_frontend_has(
    disagg: Graph, tmp_path: Path, section: str
) -> None:
    config = both(engine="vllm", model="org/name") | {section: {"served_model_name": "public"}}
    assert locate_models(disagg, config, tmp_path)["PrefillWorker"]["served-model-name"] == "public"


def test_a_workers_own_name_stays_however_it_is_spelt(disagg: Graph, tmp_path: Path) -> None:
    config = both(engine="vllm", model="./m")
    config["VllmWorker"]["served_model_name"] = "mine"
    section = locate_models(disagg, config, tmp_path)["VllmWorker"]
    assert section["served_model_name"] == "mine"
    assert "served-model-name" not in section


def test_a_hub_name_is_its_own_public_name(disagg: Graph, tmp_path: Path) -> None:
    config = both(engine="vllm", model="org/name")
    assert locate_models(disagg, config, tmp_path) == config


def test_a_simulated_model_stays_as_it_was_written(disagg: Graph, tmp_path: Path) -> None:
    config = both(engine="sim", model="./m") | {"Frontend": {"served_model_name": "public"}}
    assert locate_models(disagg, config, tmp_path) == config


# -- the engines that there are ------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_parallel_size_that_is_not_the_gpus_is_refused_naming_both(
    disagg: Graph, hugging_face: Path, engine: str
) -> None:
    config = both(engine=engine, model=str(hugging_face), tensor_parallel_size=2)
    config["VllmWorker"]["ServiceArgs"] = {"resources": {"gpu": 4}}
    with pytest.raises(ConfigError, match=r"VllmWorker: tensor-parallel-size 2 .*resources.gpu is 4"):
        check(disagg, config)


def test_llamacpp_refuses_an_option_that_it_does_not_know(disagg: Graph, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    config = both(engine="llamacpp", model=str(tmp_path / "m.gguf"), ctx_sise=3)
    with pytest.raises(ConfigError, match=r"VllmWorker: .*ctx-sise") as caught:
        check(disagg, config)
    assert "ctx-size" in str(caught.value)


def test_an_original_config_with_a_real_engine_is_checked_like_any_other(disagg: Graph) -> None:
    with pytest.raises(ConfigError, match="VllmWorker: model is '/gone'"):
        check(disagg, both(engine="vllm", model="/gone"))


def test_paths_of_files_become_absolute_and_names_stay(disagg, tmp_path):
    (tmp_path / "results").mkdir()
    planner = {"profile-results-dir": "results", "log-dir": "logs", "load_predictor_warmup_trace": "poisson"}
    located = locate_models(disagg, {"Planner": planner, "VllmWorker": {"profile": "mocker"}}, tmp_path)
    assert located["Planner"] == {
        "profile-results-dir": str(tmp_path / "results"),
        "log-dir": str(tmp_path / "logs"),
        "load_predictor_warmup_trace": "poisson",
    }
    assert located["VllmWorker"] == {"profile": "mocker"}


GIB = 2**30
H100 = (Gpu(0, "GPU-0", "H100", 80 * GIB), Gpu(1, "GPU-1", "H100", 80 * GIB))


def found(
    monkeypatch: pytest.MonkeyPatch,
    need: MemoryNeed | None,
    engine: str = "llamacpp",
    gpus: tuple[Gpu, ...] = (),
    workers: int = 1,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """The lines and warnings about one service on a box of 24 GiB, 20 of them free."""
    monkeypatch.setattr("dynaplan.cli.serve_checks.memory_need", lambda *_: need)
    monkeypatch.setattr("dynaplan.cli.serve_checks.box_memory", lambda: BoxMemory(24 * GIB, 20 * GIB))
    spec = GraphSpec("g:S", "/", "ns", (ServiceSpec("VllmWorker", Role.DECODE, workers, 1),))
    config = {"VllmWorker": {"engine": engine, "model": "m", **options}}
    return check_memory(spec, config, gpus, is_simulated=not gpus)


def need(weights_gb: float, kv_gb: float, is_certain: bool = True, sequences: int = 1) -> MemoryNeed:
    token_bytes = kv_gb * GIB / 400_000 / sequences
    return MemoryNeed(weights_gb * GIB, token_bytes, 400_000, sequences, is_certain)


def test_what_fits_is_told_and_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, warnings = found(monkeypatch, need(1, 10))
    assert lines == [
        "VllmWorker: weights 1.0 GiB + KV 10.0 GiB (400000 tokens of 26.2 KiB) = 11.0 GiB for its worker, "
        "of 24.0 GiB of this box"
    ]
    assert warnings == []
    assert found(monkeypatch, None) == ([], [])


def test_entries_beyond_the_box_are_refused_with_the_longest_context_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError) as raised:
        found(monkeypatch, need(0.1, 37, sequences=4))
    text = str(raised.value)
    assert "VllmWorker: max-model-len is 400000 for each of 4 requests (max-num-seqs)" in text
    assert "37.0 GiB of KV entries and 0.1 GiB of weights per worker; this box has 24.0 GiB" in text
    assert "The longest context that fits is max-model-len: 258304." in text
    assert 0.1 + 37 * 258304 / 400_000 < 24 < 0.1 + 37 * 258560 / 400_000 + 0.02


def test_workers_share_weights_but_not_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, need(10, 5))[1] == []
    assert found(monkeypatch, need(8, 5), workers=2)[1] == []
    (warning,) = found(monkeypatch, need(8, 7), workers=2)[1]
    assert "all 2 workers need 22.0 GiB; 20.0 GiB of 24.0 GiB are free now" in warning
    with pytest.raises(ConfigError, match=r"all 3 workers need 29\.0 GiB; this box has 24"):
        found(monkeypatch, need(8, 7), workers=3)


def test_an_estimate_that_may_be_too_large_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = found(monkeypatch, need(1, 37, is_certain=False))[1]
    assert "this box has 24.0 GiB. The longest context that fits" in warning
    (warning,) = found(monkeypatch, need(30, 1, is_certain=False))[1]
    assert "Not even the weights fit." in warning


def test_vllm_is_refused_what_its_gpus_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, need(16, 60), "vllm", H100)[1] == []
    with pytest.raises(
        ConfigError, match=r"its GPUs have 80\.0 GiB for it\n.*max-model-len: .*kv-cache-dtype"
    ):
        found(monkeypatch, need(16, 70), "vllm", H100)


def test_llamacpp_leaves_on_the_cpu_what_its_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = found(monkeypatch, need(16, 70), gpus=H100)[1]
    assert "its GPUs have 80.0 GiB" in warning
    with pytest.raises(ConfigError, match="this box has"):
        found(monkeypatch, need(16, 70), gpus=H100, **{"n-gpu-layers": 0})


def test_a_user_reads_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    monkeypatch.setattr("dynaplan.engines.requirements.Requirement.check", lambda *_: None)
    path = written(tmp_path, GOOD)
    arguments = ["serve", "graphs.agg:Frontend", "-f", "llamacpp.yaml", "--dry-run", "--gpus", "2"]
    arguments += [f"--Common.model={path}", "--Common.max-model-len=9000000000"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Error: VllmWorker: max-model-len is 9000000000 for each of 4 requests" in text
    assert "Traceback" not in text
    main_arguments = [*arguments[:-1], "--Common.max-model-len=4096"]
    with pytest.raises(SystemExit) as ended:
        main(main_arguments)
    assert ended.value.code == 0
    assert "VllmWorker: weights 0 MiB + KV 4 MiB (4 x 4096 tokens of 0.2 KiB)" in capsys.readouterr().out


def test_the_prefill_workers_of_a_model_compute_as_its_decode_workers_do(
    tmp_path: Path, checked: list[tuple[str, Any, float]]
) -> None:
    models = {"a": {"model": "/a.gguf", "max-num-seqs": 4, "prefill": {"max-num-seqs": 2}}}
    config = with_worker_sections({"Models": models})
    graph = load_graph("dynaplan.components:Frontend", tmp_path)
    graph = graph.with_models({"a": "a"}, prefill={"a": "a-prefill"})
    with pytest.raises(
        ConfigError, match=r"a\.max-num-seqs is 4, but a-prefill\.max-num-seqs is 2"
    ) as raised:
        check(graph, config)
    assert raised.value.hint == "Expected the same. Write it in Models.a, and not below prefill."
