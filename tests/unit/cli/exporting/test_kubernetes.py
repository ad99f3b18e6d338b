"""``dynaplan export kubernetes`` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynaplan.cli import main


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", "kubernetes", *arguments])
    return int(str(ended.value.code))


def test_a_graph_is_printed_as_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1", "--VllmWorker.max-num-seqs=7") == 0
    printed = capsys.readouterr()
    documents = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(printed.out)}
    assert ("Deployment", "dynamo-decode") in documents
    config = yaml.safe_load(documents["ConfigMap", "dynamo-graph"]["data"]["graph.yaml"])
    assert config["VllmWorker"]["max-num-seqs"] == 7
    assert "no API key" in printed.err


def test_with_the_clusters_discovery_an_aggregated_graph_has_no_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = ("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1")
    assert run(*graph, "--store", "kubernetes") == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    pods = [each["spec"]["template"] for each in documents if each["kind"] == "Deployment"]
    for pod in pods:
        environment = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert environment["DYN_DISCOVERY_BACKEND"] == "kubernetes"
        assert environment["NATS_SERVER"] == ""
        assert "ETCD_ENDPOINTS" not in environment
    assert len(pods) == 3


def test_one_store_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    graph = ("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1")
    assert run(*graph, "--store", "kubernetes", "--etcd", "http://etcd:2379") == 2
    assert "there is one key-value store" in capsys.readouterr().err


def test_each_object_is_written_into_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "graphs.agg:Frontend",
        "-f",
        "agg.yaml",
        "--image",
        "i:1",
        "-o",
        "out",
        "--operator",
        "dynamo",
    )
    assert run(*arguments, "--name", "llm") == 0
    assert (tmp_path / "out" / "dynamographdeployment-llm.yaml").is_file()
    assert "kubectl apply -f out" in capsys.readouterr().out


def test_what_no_server_takes_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.json").write_bytes(bytes(2**20))
    planner = ("--Planner.policy=sla", "--Planner.profile-results-dir=profile.json")
    assert run("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1", "-o", "out", *planner) == 2
    assert "the ConfigMap dynamo-planner would be larger than 1 MiB" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_graph_something_must_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--image", "i:1") == 2
    assert "no deployment is running here" in capsys.readouterr().err
