"""What users type wrongly, as data: the command, the words that its answer must name, and its exit code.

The words are the cause, the key or value at fault, and the next step. Most were made by users who tried
dynaplan for the first time; a number is that of the first such list.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynaplan.cli.main import main

AGG = "serve graphs.agg:Frontend -f agg.yaml --dry-run --gpus 8"
DISAGG = "serve graphs.disagg:Frontend -f disagg.yaml --dry-run"
LLAMA = "serve m.gguf --dry-run"

MISTAKES: list[tuple[str, list[str]]] = [
    # graphs and models
    ("serve graphs.disag:Frontend", ["graphs.disag", "Did you mean 'graphs.disagg'?"]),  # 1
    ("serve graphs.disagg:Fronted", ["Fronted", "Did you mean 'Frontend'?"]),  # 2
    ("serve llama3", ["No module named 'llama3'", "dynaplan pull", "smollm2", ".gguf"]),
    ("serve llama3:8b", ["llama3:8b", "dynaplan pull", ".gguf"]),
    ("serve hf.co/Qwen/Qwen3-0.6B-GGUF", ["no model from there", "hf download Qwen/Qwen3-0.6B-GGUF"]),
    ("serve https://huggingface.co/a/b", ["hf download a/b", "`dynaplan serve a/b`"]),
    ("serve ./empty", ["without a model or a graph", "config.json", ".gguf", "dynaplan pull"]),
    ("serve smollm2 --dry-run", ["not on this machine yet", "dynaplan pull smollm2"]),
    ("serve graphs.agg:Frontend --model foo", ["--model", "dynaplan serve graphs.agg:Frontend"]),  # 6
    ("serve needs_pydantic:Frontend", ["pydantic", "needs_pydantic.py", "pip install pydantic"]),
    (
        "serve graphs.agg:Frontend --VllmWorker.engine=vllm --Common.model=a/b --dry-run",
        ["common-configs", "Write --VllmWorker.model=a/b", "-f vllm.yaml"],
    ),
    (f"{AGG} --Common.engine=vllm --Common.model=a/b", ["pip install 'vllm'", "vllm-command"]),  # 17
    ("serve", ["dynaplan serve model.gguf", "dynaplan serve models.yaml", "graphs.disagg:Frontend -f"]),
    # files
    ("serve sections.yaml", ["no section Models", "graphs.agg:Frontend -f", "graphs.disagg:Frontend"]),
    ("serve modells.yaml", ["'Modells'", "Did you mean 'Models'?"]),
    ("serve empty.yaml", ["Models names no model", "{NAME: {model: x.gguf}}"]),
    ("serve listed.yaml --dry-run", ["Models is not a mapping", "Models: {NAME: {model:"]),
    ("serve graphs.agg:Frontend -f agg.yaml --gpus two", ["'two'", "a number of GPUs, or all"]),
    ("serve graphs.agg:Frontend -f agg.yaml --gpus 0,1", ["CUDA_VISIBLE_DEVICES=0,1", "--gpus 2"]),
    (
        "serve graphs.disagg:Frontend -f disag.yaml",
        ["no such file in", "Did you mean 'disagg.yaml'?"],
    ),  # 3
    (
        "serve graphs.agg:Frontend --config nothere.yaml",
        ["-f nothere.yaml", "no such file in", "Known:"],
    ),  # 7
    ("serve graphs.agg:Frontend --config-file tow.yaml", ["VlmWorker", "Did you mean 'VllmWorker'?"]),  # 9
    ("serve graphs.agg:Frontend -f list.yaml", ["list.yaml", "Write sections such as"]),  # 13
    ("simulate --trace bursts --config nothere.yaml", ["-f nothere.yaml", "no such file in"]),  # 42
    # options of services
    (f"{AGG} --VllmWorker.max-num-seq=3", ["max-num-seq", "Did you mean 'max-num-seqs'?"]),  # 8
    (f"{AGG} --VllmWorker.engine=vlm", ["'vlm'", "Did you mean 'vllm'?", "llamacpp"]),  # 10
    (f"{DISAGG} --Planner.adjustment-interval=ten", ["'ten'", "expected a number, more than 0"]),  # 11
    (f"{AGG} --VllmWorker.workers=9", ["workers", "Write --VllmWorker.ServiceArgs.workers=9"]),
    (
        f"{AGG} --Frontend.ServiceArgs.workers=many",
        ["Frontend.ServiceArgs.workers", "'many'", "a whole number of at least 1, or auto"],
    ),
    (
        f"{AGG} --VllmWorker.ServiceArgs.workers=auto",
        ["VllmWorker.ServiceArgs.workers", "'auto'", "expected a whole number of at least 1"],
    ),
    (f"{AGG} --VllmWorker.gpu=2", ["Write --VllmWorker.ServiceArgs.resources.gpu=2"]),
    (f"{AGG} --Router.router=kvv", ["Router.router", "'kvv'", "round-robin", "kv"]),
    (f"{AGG} --VllmWorker.ServiceArgs.workers=9", ["9 x 1", "8 visible", "Lower"]),  # 22
    (
        f"{DISAGG} --Planner.policy=sla --Planner.profile-results-dir=nowhere",
        ["profile", "`dynaplan profile-sla -f FILE`", "Leave it out: the planner learns"],
    ),  # 37
    (f"{AGG} --on-event http:/x", ["http:/x", "no address of a web server", "http://HOST/PATH"]),
    (f"{AGG} --on-event no-such-program", ["no program 'no-such-program'"]),
    (f"{AGG} --store redis", ["'redis'", "Known: etcd, file, kubernetes, nats."]),
    # commands
    ("rm", ["No such command 'rm'", "Did you mean 'stop'?"]),
    ("ps", ["No such command 'ps'", "Did you mean 'status'?"]),  # 38
    ("status --namespace tow", ["no deployment tow"]),  # 24
    ("status", ["no deployment is running", "dynaplan serve", "DYN_LOCAL_STATE_DIR"]),  # 25
    ("why mine", ["no deployment mine"]),
    ("bench mine", ["no deployment mine"]),
    ("reload mine", ["no deployment mine"]),
    ("orchestrate mine --exec true", ["no deployment mine"]),
    ("scale --decode 3", ["No such option '--decode'", "dynaplan scale decode=3"]),
    ("scale decode --at-lest 2", ["--at-lest", "--at-least"]),
    ("export kube", ["No such command 'kube'", "Did you mean 'kubernetes'?"]),
    ("export kubernetes", ["--image is missing", "podman build", "Containerfile"]),
    ("export systemd", ["which graph", "dynaplan export systemd GRAPH"]),
    ("bench --url localhost:8000", ["localhost:8000", "Write http://localhost:8000."]),
    ("bench --url http://127.0.0.1:1 --trace nothere.jsonl", ["there is no trace nothere.jsonl"]),
    ("simulate --trace sinusoid: --policy sal", ["sal", "Did you mean 'sla'?"]),  # 41
    ("simulate", ["Missing option '--trace'", "--trace sinusoid:low="]),
    ("profile-sla", ["Missing option '-f'", "dynaplan profile-sla -f llamacpp.yaml"]),
    ("run models.yaml", ["there is no program 'models.yaml'", "`dynaplan serve`"]),
    ("pull Qwen/Qwen3-0.6B-GGUF", ["a model on the hub", "hf download Qwen/Qwen3-0.6B-GGUF"]),
    ("pull hf.co/Qwen/Qwen3-0.6B-GGUF", ["hf download Qwen/Qwen3-0.6B-GGUF"]),
    ("compat no-such-program", ["cannot run no-such-program", "dynaplan compat python client.py"]),
    ("simulate --trace sinus:", ["sinus", "Did you mean 'sinusoid'?"]),  # 41
]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home, and the files that the mistakes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("DYNAPLAN_NODE_DIR", "DYN_LOCAL_STATE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in (
        "ETCD_ENDPOINTS",
        "NATS_SERVER",
        "DYN_NAMESPACE",
        "DYN_DISCOVERY_BACKEND",
        "DYNAPLAN_ON_EVENT",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "list.yaml").write_text("VllmWorker:\n  - engine: sim\n")
    (tmp_path / "tow.yaml").write_text("VlmWorker:\n  engine: sim\n")
    (tmp_path / "sections.yaml").write_text("VllmWorker:\n  engine: sim\n")
    (tmp_path / "modells.yaml").write_text("Modells: {a: {engine: sim}}\n")
    (tmp_path / "empty.yaml").write_text("models: {}\n")
    (tmp_path / "listed.yaml").write_text("Models:\n  - model: a.gguf\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "needs_pydantic.py").write_text("import pydantic\n")
    monkeypatch.setitem(sys.modules, "pydantic", None)


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_answered_with_its_cause_and_the_next_step(
    typed: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    printed = capfd.readouterr()
    answer = printed.out + printed.err
    assert [word for word in words if word not in answer] == [], answer
    assert ended.value.code == 2, answer
    assert "Traceback" not in answer


def test_a_state_directory_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(SystemExit):
        main(["serve", "graphs.agg:Frontend", "-f", "agg.yaml", "--port", "0"])
    answer = capfd.readouterr().err
    assert str(tmp_path / "file") in answer
    assert "DYN_LOCAL_STATE_DIR" in answer


def test_gpus_that_others_have_now_are_a_warning_of_the_dry_run_and_the_rest_is_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for index in range(8):
        (tmp_path / f"gpu-{index}.json").write_text('{"used_bytes": 76000000000}')
    with pytest.raises(SystemExit) as ended:
        main(AGG.split())
    printed = capfd.readouterr()
    assert ended.value.code == 0
    assert "it cannot start now: the graph does not fit the GPUs" in printed.err
    assert "does not fit" in printed.out
    assert "GOES TO" in printed.out
