"""A graph and its configuration, described for a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dynaplan.cluster.describing import planner_flags, without_secrets
from dynaplan.cluster.sources import of_graph
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError
from tests.unit.cluster.deployments import disagg, exported, part


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
    from dynaplan.cli.components.planner import command

    settings = PlannerSettings.from_options(
        {"namespace": "box", "policy": "sla", "itl": 12.25, "min-endpoint": 2, "consolidation-guard": False}
    )
    context = command.make_context("planner", planner_flags(settings, {}))
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
    servers = exported(of_graph(f"graphs.{graph}:Frontend", f"{graph}.yaml", "box", []), **wishes).servers
    assert (servers.store, servers.nats_url, servers.etcd_url, servers.is_own_nats) == expected


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
    source = of_graph("graphs.hello_world:Frontend", "hello_world.yaml", "box", [])
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
