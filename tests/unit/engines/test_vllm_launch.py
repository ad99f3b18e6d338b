from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from typing import Any

import pytest

from dynaplan.engines import vllm
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server.kind import LaunchLine
from dynaplan.util.errors import ConfigError

TOKEN = "the-worker-token"
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPU)
    monkeypatch.delenv("DYNAPLAN_DRAIN_DEADLINE_S", raising=False)


def launch(
    options: dict[str, Any] | None = None, *, role: str = "decode", gpus: float = 1, address: str = ""
) -> LaunchLine:
    options = {"model": "/models/m", "vllm-command": "vllm serve", **(options or {})}
    context = EngineContext("w", role, address, token=TOKEN, gpus=gpus)
    vllm.KIND.check(options, gpus)
    ports = range(20001, 20001 + vllm.KIND.ports_needed(options, context))
    return vllm.KIND.command(options, context, tuple(ports))


def flag(made: LaunchLine, name: str) -> str | None:
    """The word after the flag; None when the flag is not there."""
    assert made.argv.count(name) <= 1, f"{name} twice"
    return made.argv[made.argv.index(name) + 1] if name in made.argv else None


def test_an_aggregated_worker_is_one_plain_server_on_the_loopback() -> None:
    made = launch()
    assert made.argv[:3] == ("vllm", "serve", "/models/m")
    assert flag(made, "--host") == "127.0.0.1"
    assert flag(made, "--port") == "20001"
    assert flag(made, "--served-model-name") == "/models/m"
    assert flag(made, "--shutdown-timeout") == "600"
    assert "--kv-transfer-config" not in made.argv
    assert "--tensor-parallel-size" not in made.argv
    assert "--gpu-memory-utilization" not in made.argv
    assert not any("NIXL" in name for name in made.environment)


def test_the_token_is_in_the_environment_and_never_on_the_command_line() -> None:
    for role in ("decode", "prefill"):
        made = launch(role=role)
        assert made.environment["VLLM_API_KEY"] == TOKEN
        assert not any(TOKEN in word for word in made.argv)


def test_its_key_is_asked_for_on_every_path_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    made = launch({"middleware": "mine.Timing"})
    guards = [word for flag, word in itertools.pairwise(made.argv) if flag == "--middleware"]
    assert guards == ["mine.Timing", "dynaplan_vllm_guard.Guard"]
    directory, mine = made.environment["PYTHONPATH"].split(os.pathsep)
    assert os.listdir(directory) and mine == "/mine"
    unguarded = launch({"middleware": None})
    assert "--middleware" not in unguarded.argv and "PYTHONPATH" not in unguarded.environment


def test_sockets_for_kv_blocks_are_on_this_machine_only_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert launch(role="prefill").environment["UCX_NET_DEVICES"] == "lo"
    assert launch({"remote-prefill": True}).environment["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in launch().environment
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert "UCX_NET_DEVICES" not in launch(role="prefill").environment


def test_usage_is_not_reported_to_anybody() -> None:
    assert launch().environment["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(
    ("options", "role", "kv_role"),
    [({}, "prefill", "kv_producer"), ({"remote-prefill": True}, "decode", "kv_consumer")],
)
def test_in_a_disaggregated_graph_kv_blocks_move_by_nixl(
    options: dict[str, Any], role: str, kv_role: str
) -> None:
    made = launch(options, role=role)
    config = json.loads(flag(made, "--kv-transfer-config") or "")
    assert config == {"kv_connector": "NixlConnector", "kv_role": kv_role}
    assert made.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert made.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "20002"


@pytest.mark.parametrize(
    ("address", "options", "host", "devices"),
    [
        ("http://10.0.0.2:9", {"kv-network": True}, "10.0.0.2", None),
        ("http://10.0.0.2:9", {}, "127.0.0.1", "lo"),
        ("http://127.0.0.1:9", {"kv-network": True}, "127.0.0.1", "lo"),
    ],
)
def test_nixl_listens_on_the_network_only_where_it_was_opened(
    monkeypatch: pytest.MonkeyPatch, address: str, options: dict[str, Any], host: str, devices: str | None
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    made = launch(options, role="prefill", address=address)
    assert made.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
    assert made.environment.get("UCX_NET_DEVICES") == devices
    assert "kv-network" not in " ".join(made.argv)


@pytest.mark.parametrize("devices", ["", "GPU-SIM-0,GPU-SIM-1", None])
def test_without_a_gpu_the_blocks_move_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, devices: str | None
) -> None:
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    config = json.loads(flag(launch(role="prefill", gpus=0), "--kv-transfer-config") or "")
    assert config["kv_buffer_device"] == "cpu"


@pytest.mark.parametrize(
    "given", [{"kv_connector": "Mine", "kv_role": "kv_both"}, '{"kv_connector":"Mine","kv_role":"kv_both"}']
)
def test_a_kv_transfer_that_the_user_describes_is_taken_as_it_is(given: Any) -> None:
    made = launch({"kv-transfer-config": given, "remote-prefill": True})
    assert json.loads(flag(made, "--kv-transfer-config") or "")["kv_connector"] == "Mine"


def test_the_connector_of_configurations_written_for_dynamo_means_nixl() -> None:
    old = {"kv-transfer-config": '{"kv_connector":"DynamoNixlConnector"}'}
    made = launch({**old, "remote-prefill": True})
    assert json.loads(flag(made, "--kv-transfer-config") or "")["kv_connector"] == "NixlConnector"
    assert "--kv-transfer-config" not in launch(old).argv


def test_every_gpu_of_a_worker_has_a_port_for_its_side_channel() -> None:
    context = EngineContext("w", "prefill", gpus=4)
    assert vllm.KIND.ports_needed({}, context) == 5
    assert vllm.KIND.ports_needed({}, EngineContext("w", "decode", gpus=4)) == 1


def test_the_sizes_that_others_call_otherwise_are_vllms_flags() -> None:
    made = launch({"tp-size": 2, "pp-size": 2, "dp-size": 2}, gpus=8)
    assert flag(made, "--tensor-parallel-size") == "2"
    assert flag(made, "--pipeline-parallel-size") == "2"
    assert flag(made, "--data-parallel-size") == "2"
    assert vllm.KIND.ports_needed({"dp-size": 2}, EngineContext("w", "prefill", gpus=2)) == 3


def test_two_gpus_split_the_layers() -> None:
    assert flag(launch(gpus=2), "--tensor-parallel-size") == "2"
    assert flag(launch({"tensor-parallel-size": 2}, gpus=2), "--tensor-parallel-size") == "2"


def test_gpus_that_contradict_the_tensor_parallel_size_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"tensor-parallel-size 4.*resources\.gpu is 2"):
        launch({"tensor-parallel-size": 4}, gpus=2)


def test_a_part_of_a_gpu_gets_that_part_of_its_memory_unless_the_user_says_another() -> None:
    assert flag(launch(gpus=0.4), "--gpu-memory-utilization") == "0.36"
    assert flag(launch({"gpu-memory-utilization": 0.3}, gpus=0.4), "--gpu-memory-utilization") == "0.3"
    assert flag(launch({"gpu-memory-utilization": 0.8}), "--gpu-memory-utilization") == "0.8"


def test_options_that_nobody_here_knows_reach_vllm() -> None:
    options = {"max-num-seqs": 8, "brand-new-flag": "x", "hf-overrides": {"a": 1}, "enforce-eager": True}
    made = launch(options)
    assert flag(made, "--max-num-seqs") == "8"
    assert flag(made, "--brand-new-flag") == "x"
    assert flag(made, "--hf-overrides") == '{"a":1}'
    assert "--enforce-eager" in made.argv


def test_what_vllm_has_on_by_itself_can_be_switched_off() -> None:
    made = launch({"enable-prefix-caching": False, "enable-chunked-prefill": False, "enforce-eager": False})
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill"} <= set(made.argv)
    assert not any("eager" in word for word in made.argv)


def test_options_of_ours_do_not_reach_vllm() -> None:
    ours = {"engine": "vllm", "router": "kv", "remote-prefill": False, "hang-timeout": 60, "start-timeout": 9}
    ours |= {"speedup-ratio": 2, "max-local-prefill-length": 10, "drain-deadline": 30, "min-workers": 1}
    assert not any(name in word for name in ours for word in launch(ours).argv[3:])


def test_flags_that_vllm_has_dropped_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    made = launch({"disable-log-requests": True, "swap-space": 4, "use-v2-block-manager": False})
    assert not any("log-requests" in word or "swap" in word or "v2" in word for word in made.argv)
    assert "disable-log-requests" in caplog.text and "swap-space" in caplog.text
    assert "use-v2-block-manager" not in caplog.text


def test_the_drain_is_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAPLAN_DRAIN_DEADLINE_S", "45")
    assert flag(launch(), "--shutdown-timeout") == "45"
    assert flag(launch({"drain-deadline": 20}), "--shutdown-timeout") == "20"
    assert flag(launch({"shutdown-timeout": 7}), "--shutdown-timeout") == "7"
    assert flag(launch({"shutdown-timeout": None}), "--shutdown-timeout") is None  # for vLLM without it


@pytest.mark.parametrize("given", ["python -m vllm.entrypoints.openai.api_server", ["my", "vllm"]])
def test_a_command_other_than_vllm_serve_gets_its_model_by_flag(given: Any) -> None:
    made = launch({"vllm-command": given})
    assert flag(made, "--model") == "/models/m"
    assert made.argv[: len(given.split() if isinstance(given, str) else given)][-1] in (
        "vllm.entrypoints.openai.api_server",
        "vllm",
    )


def test_the_command_of_the_own_environment_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(vllm, "_is_package", lambda name: name == "vllm")
    monkeypatch.setattr(vllm, "_is_module", lambda name: True)
    assert vllm.default_program()[0] == str(tmp_path / "python")  # no such command
    (tmp_path / "vllm").touch()
    assert vllm.default_program() == [str(tmp_path / "vllm"), "serve"]
    monkeypatch.setattr(vllm, "_is_package", lambda name: False)  # a build of another name: it cannot work
    assert vllm.default_program() == [str(tmp_path / "python"), "-m", "vllm.entrypoints.openai.api_server"]


def test_every_dropped_flag_is_told_what_came_of_it() -> None:
    assert all(len(why) > 5 for why in vllm.FLAGS.removed.values())
    assert not set(vllm.FLAGS.removed) & vllm.FLAGS.handled


@pytest.mark.parametrize(("gpus", "has_flag"), [("GPU-1", True), ("GPU-SIM-1", False), ("", False)])
def test_a_vllm_that_may_sleep_has_the_paths_for_it_and_the_flag_where_its_platform_takes_it(
    monkeypatch: pytest.MonkeyPatch, gpus: str, has_flag: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert "VLLM_SERVER_DEV_MODE" not in launch().environment
    made = launch({"enable-sleep-mode": True})
    assert made.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert ("--enable-sleep-mode" in made.argv) is has_flag
