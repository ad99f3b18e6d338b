"""``dynaplan export kubernetes`` as a user types it."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from dynaplan.cli import main
from dynaplan.cli.export import write_documents, yaml_of
from dynaplan.util.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
SECRET = {"kind": "Secret", "metadata": {"name": "box-secret"}, "stringData": {"token": "t"}}
MAP = {"kind": "ConfigMap", "metadata": {"name": "box-graph"}, "data": {"graph.yaml": "a: 1\nb: on\n"}}


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
    assert "keep it to yourself" in printed.err


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


def test_automatic_frontends_go_by_the_gpus_of_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--Frontend.ServiceArgs.workers=auto", "--VllmWorker.ServiceArgs.workers=5")
    assert run("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1", *arguments) == 0
    documents = {each["metadata"]["name"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    assert documents["dynamo-frontend"]["spec"]["replicas"] == 3


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


@pytest.mark.parametrize("graph", [(), ("graphs.agg:Frontend", "-f", "agg.yaml")])
def test_without_an_image_it_says_which_one_and_how_it_is_built(
    graph: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*graph) == 2
    answer = capsys.readouterr().err
    for words in ("--image is missing", "with dynaplan and the engine in it", "--image REGISTRY/dynaplan:1"):
        assert words in answer
    (command,) = re.findall(r"podman build .*", answer)
    extras = re.search(r"EXTRAS=(\S+)", command)
    assert extras
    assert "ARG EXTRAS" in (REPOSITORY / "Containerfile").read_text()
    known = ConfigParser()
    known.read(REPOSITORY / "setup.cfg")
    assert set(extras[1].split(",")) <= set(known["options.extras_require"])


def test_models_that_are_loaded_on_request_are_refused_with_what_can_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("Models: {ant: {engine: sim}}\n")
    assert run(str(file), "--image", "i:1") == 2
    assert run("graphs.agg:Frontend", "-f", str(file), "--image", "i:1") == 2
    answer = capsys.readouterr().err
    assert answer.count("loaded on request share the memory of one machine") == 2
    assert "--Common.model=MODEL" in answer


def test_warnings_of_the_configuration_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graphs.agg:Frontend", "-f", "agg.yaml", "--image", "i:1", "--Common.nothing=1") == 0
    assert "Common.nothing has no effect" in capsys.readouterr().err


def test_what_is_written_is_read_back_and_a_file_in_it_stays_readable() -> None:
    text = yaml_of([SECRET, MAP])
    assert list(yaml.safe_load_all(text)) == [SECRET, MAP]
    assert "graph.yaml: |\n    a: 1\n" in text


def test_objects_are_files_that_nobody_else_reads(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    for _ in range(2):
        write_documents([SECRET, MAP], directory)
    files = {each.name: each.stat().st_mode & 0o777 for each in directory.iterdir()}
    assert files == {"secret-box-secret.yaml": 0o600, "configmap-box-graph.yaml": 0o600}


def test_an_earlier_exports_files_are_named_as_they_would_be_applied_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_documents([SECRET, MAP], tmp_path)
    assert not capsys.readouterr().err
    write_documents([SECRET], tmp_path)
    assert "configmap-box-graph.yaml" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file/out: Not a directory"):
        write_documents([SECRET], tmp_path / "file" / "out")
