"""A graph and its configuration, described for a cluster."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes import description as module
from dynaplan.kubernetes.description import pack_history, planner_files, planner_flags, without_secrets
from dynaplan.kubernetes.sources import graph_source
from dynaplan.planner.forecasting.traffic_history import interval_history
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.util.errors import ConfigError
from tests.unit.kubernetes.deployments import disagg, exported, part


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))


def test_workers_name_their_model_where_the_planner_reads_it() -> None:
    found = exported(disagg())
    model = ("--model=meta-llama/Llama-3.1-8B-Instruct",)
    arguments = [part(found, role).arguments for role in (Role.FRONTEND, Role.DECODE, Role.PREFILL)]
    assert arguments == [(), model, model]


def test_the_planner_has_its_settings_and_what_the_graph_says_of_the_workers() -> None:
    source = disagg("--Planner.policy=both", "--Planner.ttft=300.5", "--Planner.no-operation=true")
    flags = part(exported(replace(source, startup_s=41.0)), Role.PLANNER).arguments
    assert {
        *("--environment=kubernetes", "--namespace=box", "--policy=both", "--ttft=300.5"),
        *("--no-operation=true", "--max-model-len=16384", "--startup-time=41"),
        *("--metric-reporting-prometheus-host=0.0.0.0", "--metric-reporting-prometheus-port=9085"),
    } <= set(flags)


def test_flags_of_the_planner_are_read_as_the_same_settings() -> None:
    from dynaplan.cli.component_commands import planner

    settings = PlannerSettings.from_options(
        {"namespace": "box", "policy": "sla", "itl": 12.25, "min-endpoint": 2, "consolidation-guard": False}
    )
    context = planner.make_context("planner", planner_flags(settings, {}))
    read = PlannerSettings.from_options(context.meta["dynaplan.flags"].known)
    assert read == replace(
        settings,
        environment="kubernetes",
        metric_reporting_prometheus_port=9085,
        metric_reporting_prometheus_host="0.0.0.0",
    )


def test_a_directory_of_logs_on_this_box_is_not_the_pods() -> None:
    assert not [flag for flag in planner_flags(PlannerSettings(log_dir="/logs"), {}) if "log-dir" in flag]


def test_workers_have_their_gpus_requests_counts_and_time_to_drain() -> None:
    found = exported(
        disagg(
            *("--VllmWorker.ServiceArgs.workers=3", "--VllmWorker.ServiceArgs.resources.cpu=8"),
            *("--VllmWorker.ServiceArgs.resources.gpu=2", "--VllmWorker.drain-deadline=90"),
        )
    )
    decode, prefill = part(found, Role.DECODE), part(found, Role.PREFILL)
    assert (decode.replicas, decode.gpus, decode.drain_s, decode.requests) == (3, 2, 90.0, {"cpu": "8"})
    assert (prefill.replicas, prefill.gpus, prefill.drain_s, prefill.requests) == (1, 1, 600.0, {})


def test_a_share_of_a_gpu_becomes_a_whole_one_for_the_engine_too() -> None:
    found = exported(disagg("--VllmWorker.ServiceArgs.resources.gpu=0.5"))
    assert part(found, Role.DECODE).gpus == 1
    section = yaml.safe_load(found.config)["VllmWorker"]
    assert section["ServiceArgs"]["resources"]["gpu"] == 1


def test_kv_entries_of_vllm_move_between_pods_and_its_engines_share_memory() -> None:
    found = exported(disagg(file="vllm_disagg.yaml"))
    sections = yaml.safe_load(found.config)
    assert [sections[name]["kv-network"] for name in ("VllmWorker", "PrefillWorker")] == [True, True]
    assert part(found, Role.DECODE).has_engine
    assert found.framework == "vllm"
    simulated = exported(disagg())
    assert "kv-network" not in simulated.config
    assert (part(simulated, Role.DECODE).has_engine, simulated.framework) == (False, "")


def test_workers_of_a_real_engine_name_the_model_as_clients_do() -> None:
    model = "--Common.model=org/model-7b"
    names = [
        part(exported(disagg(model, *more, file="vllm_disagg.yaml")), Role.PREFILL).arguments[-1]
        for more in ((), ("--Frontend.served-model-name=mine",), ("--PrefillWorker.served-model-name=other",))
    ]
    assert names[1:] == ["--served-model-name=mine", "--served-model-name=other"]
    assert names[0].startswith("--served-model-name=")


def test_the_planners_section_is_in_its_command_and_not_in_the_file() -> None:
    assert "Planner" not in yaml.safe_load(exported(disagg()).config)


def test_secrets_are_in_the_secret_and_nowhere_else() -> None:
    source = disagg(
        *(
            "--Frontend.api-key=ak-1",
            "--VllmWorker.hf-token=hf-1",
            "--VllmWorker.ServiceArgs.envs.MY_VAR=v-1",
        ),
        file="vllm_disagg.yaml",
    )
    found = exported(replace(source, token="tok-1"))
    assert (
        found.secrets.items()
        >= {
            "token": "tok-1",
            "frontend.DYNAPLAN_API_KEY": "ak-1",
            "decode.HF_TOKEN": "hf-1",
            "decode.MY_VAR": "v-1",
        }.items()
    )
    assert part(found, Role.DECODE).secrets == {"HF_TOKEN": "decode.HF_TOKEN", "MY_VAR": "decode.MY_VAR"}
    assert not [value for value in ("ak-1", "hf-1", "v-1", "tok-1") if value in found.config]


def test_the_key_of_the_command_line_comes_first() -> None:
    found = exported(disagg("--Frontend.api-key=ak-1"), api_key="ak-2")
    assert found.secrets["frontend.DYNAPLAN_API_KEY"] == "ak-2"


def test_a_graph_without_planner_has_none() -> None:
    source = disagg()
    services = tuple(each for each in source.spec.services if each.role is not Role.PLANNER)
    found = exported(replace(source, spec=replace(source.spec, services=services)))
    assert found.of_role(Role.PLANNER) is None


@pytest.mark.parametrize(
    ("graph", "wishes", "expected"),
    [
        ("disagg", {}, ("nats", "nats://box-nats:4222", "", True)),
        ("disagg", {"nats": "nats://n:4222"}, ("nats", "nats://n:4222", "", False)),
        ("disagg", {"etcd": "http://e:2379"}, ("etcd", "nats://box-nats:4222", "http://e:2379", True)),
        ("agg", {"etcd": "http://e:2379"}, ("etcd", "", "http://e:2379", False)),
        ("agg", {}, ("nats", "nats://box-nats:4222", "", True)),
    ],
)
def test_a_nats_server_of_its_own_is_there_where_the_store_or_the_queue_needs_one(
    graph: str, wishes: dict[str, str], expected: tuple[str, str, str, bool]
) -> None:
    servers = exported(graph_source(f"graphs.{graph}:Frontend", f"{graph}.yaml", "box", []), **wishes).servers
    assert (servers.store, servers.nats_url, servers.etcd_url, servers.is_own_nats) == expected


@pytest.mark.parametrize("option", ["nats", "etcd"])
def test_a_login_in_the_address_of_a_server_is_refused_and_not_repeated(option: str) -> None:
    said = rf"(?s)^--{option} .*{option.upper()}_AUTH_USERNAME and {option.upper()}_AUTH_PASSWORD in the"
    with pytest.raises(ConfigError, match=said) as refused:
        exported(disagg(), **{option: "nats://llm:pw-1@servers:4222"})
    assert "pw-1" not in str(refused.value)


def test_an_export_with_the_same_token_is_the_same(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-letters\n")
    token.chmod(0o600)
    once, again = (exported(disagg(), token_file=token) for _ in range(2))
    assert once == again
    assert once.secrets["token"] == "a-token-of-enough-letters"
    assert once.secrets["nats-token"].startswith("n")
    assert exported(disagg()).secrets["token"] != exported(disagg()).secrets["token"]


@pytest.mark.parametrize(("given", "name"), [("My_Box", "my-box"), ("box-7", "box-7"), ("_x_", "x")])
def test_a_name_is_made_one_of_kubernetes(given: str, name: str) -> None:
    assert exported(disagg(), name=given).name == name


@pytest.mark.parametrize("given", ["7", "-", "x" * 41])
def test_a_name_that_cannot_be_one_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="at most 40 letters"):
        exported(disagg(), name=given)


@pytest.mark.parametrize("given", ["models", "models:there", ":/models"])
def test_a_volume_claim_has_a_claim_and_a_path(given: str) -> None:
    with pytest.raises(ConfigError, match="Expected CLAIM:/PATH"):
        exported(disagg(), volume_claims=(given,))


def test_a_volume_claim_is_mounted_at_its_path() -> None:
    (volume,) = exported(disagg(), volume_claims=("models:/models",)).volumes
    assert (volume.claim, volume.path) == ("models", "/models")


def test_a_service_of_a_users_own_is_refused_by_name() -> None:
    source = graph_source("graphs.hello_world:Frontend", "hello_world.yaml", "box", [])
    with pytest.raises(ConfigError, match="is a service of your own"):
        exported(source)


def test_what_is_common_belongs_to_every_service() -> None:
    envs = {"ServiceArgs": {"envs": {"HF_TOKEN": "mine"}}}
    source = disagg("--Common.hf_token=h", file="vllm_disagg.yaml")
    found = exported(replace(source, config={**source.config, "VllmWorker": envs}))
    assert found.secrets.items() >= {"decode.HF_TOKEN": "mine", "prefill.HF_TOKEN": "h"}.items()


def test_the_configuration_keeps_all_but_the_secrets() -> None:
    sections, variables = without_secrets(
        {
            "Common": {"hf_token": "h"},
            "VllmWorker": {"model": "m", "ServiceArgs": {"workers": 2, "envs": {"A": 1}}},
        }
    )
    assert sections == {"Common": {}, "VllmWorker": {"model": "m", "ServiceArgs": {"workers": 2}}}
    assert variables == {"Common": {"HF_TOKEN": "h"}, "VllmWorker": {"A": "1"}}


@pytest.mark.parametrize(
    "section",
    [{"my-secret": "hidden-1"}, {"url": "http://me:pw@host"}, {"kv-events-config": '{"password": "p"}'}],
)
def test_any_other_secret_is_named_and_its_value_is_not(section: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"VllmWorker\.{next(iter(section))} holds a secret") as raised:
        without_secrets({"VllmWorker": section})
    assert next(iter(section.values())) not in str(raised.value)


def record(requests: float | None, isl: float | None = 100.0) -> dict[str, Any]:
    traffic = {"interval_s": 30.0, "requests": requests, "isl_tokens": isl, "osl_tokens": isl}
    return {
        "wall_time": "2026-01-01T00:00:00+00:00",
        "settings": {"adjustment-interval": 30.0},
        "observation": {"traffic": traffic},
        "decision": {},
    }


def targets(**options: Any) -> PlannerSettings:
    return PlannerSettings.from_options({"policy": "sla", **options})


def write_decisions(directory: Path, records: list[dict[str, Any]]) -> Path:
    folder = directory / "planner" / "20260101_000000"
    folder.mkdir(parents=True)
    (folder / "decisions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return directory


def test_a_planner_without_targets_needs_no_files(tmp_path: Path) -> None:
    found = planner_files(PlannerSettings(), write_decisions(tmp_path, [record(1)]))
    assert (found.contents, found.options) == ({}, {})


def test_a_directory_of_a_profile_is_copied_whole_but_for_its_plots(tmp_path: Path) -> None:
    half = tmp_path / "selected_prefill_interpolation"
    half.mkdir()
    (half / "raw_data.npz").write_bytes(b"PK\xff")
    (tmp_path / "plot.svg").write_text("<svg/>")
    found = planner_files(targets(**{"profile-results-dir": str(tmp_path)}), None)
    assert found.contents == {"profile/selected_prefill_interpolation/raw_data.npz": b"PK\xff"}
    assert found.options == {"profile-results-dir": "/etc/dynaplan/planner/profile"}


def test_a_profile_in_a_file_keeps_its_name_and_a_shipped_one_is_in_the_image(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")
    found = planner_files(targets(**{"profile-results-dir": str(file)}), None)
    assert found.options == {"profile-results-dir": "/etc/dynaplan/planner/profile/mine.json"}
    shipped = planner_files(targets(**{"profile-results-dir": "h200_sxm-Llama-3.1-8B-Instruct-FP8"}), None)
    assert (shipped.contents, shipped.options) == ({}, {})


def test_what_the_last_planner_measured_begins_the_next_ones_history(tmp_path: Path) -> None:
    logs = write_decisions(tmp_path, [record(4), record(None), record(0, None), record(6, 50.0), record(1)])
    found = planner_files(targets(), logs)
    name = "decisions.jsonl.gz"
    assert found.options == {"load-predictor-warmup-trace": f"/etc/dynaplan/planner/history/{name}"}
    file = tmp_path / name
    file.write_bytes(found.contents[f"history/{name}"])
    loads = interval_history(read_trace(file), 30.0)
    assert [(each.requests, each.isl_tokens) for each in loads] == [(4, 100), (0, None), (6, 50)]


def test_a_trace_of_the_users_own_comes_before_the_decisions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n')
    found = planner_files(
        targets(**{"load-predictor-warmup-trace": str(trace)}), write_decisions(tmp_path, [record(1)])
    )
    assert gzip.decompress(found.contents["history/trace.gz"]) == trace.read_bytes()
    made_up = planner_files(targets(**{"load-predictor-warmup-trace": "sinusoid:1"}), tmp_path)
    assert made_up.contents == {}


@pytest.mark.parametrize("records", [None, [{"observation": {"traffic": None}}]])
def test_without_measured_traffic_there_is_no_history(tmp_path: Path, records: list[Any] | None) -> None:
    logs = tmp_path if records is None else write_decisions(tmp_path, records)
    assert planner_files(targets(), logs).contents == {}


def test_the_oldest_decisions_go_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", 400)
    kept = [
        json.loads(line) for line in gzip.decompress(pack_history(record(n) for n in range(600))).splitlines()
    ]
    assert 0 < len(kept) < 500
    assert kept[-1] == record(599)


def test_the_planners_memory_takes_no_room_from_the_traffic() -> None:
    memory = {"state": {"hedge": [0.1] * 5000}, "next_state": {"hedge": [0.2] * 5000}}
    assert gzip.decompress(pack_history([{**record(1), **memory}])) == gzip.decompress(
        pack_history([record(1)])
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"mine\.json cannot be read: Permission denied"):
        planner_files(targets(**{"profile-results-dir": str(file)}), None)
