"""What ``serve`` says about the memory of models before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaplan.cli.main import main
from dynaplan.cli.starting.memory import check_memory
from dynaplan.engines import registry
from dynaplan.engines.timing_model.kv_memory import MemoryNeed
from dynaplan.fleet.gpus import Gpu
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.memory import BoxMemory
from dynaplan.util.errors import ConfigError
from tests.unit.engines.common.test_gguf_header import GOOD, written

GB = 2**30
H100 = (Gpu(0, "GPU-0", "H100", 80 * GB), Gpu(1, "GPU-1", "H100", 80 * GB))


def found(
    monkeypatch: pytest.MonkeyPatch,
    need: MemoryNeed | None,
    engine: str = "llamacpp",
    gpus: tuple[Gpu, ...] = (),
    workers: int = 1,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """The lines and warnings about one service on a box of 24 GB, 20 of them free."""
    monkeypatch.setattr(registry, "memory_need", lambda *_: need)
    monkeypatch.setattr(registry, "box_memory", lambda: BoxMemory(24 * GB, 20 * GB))
    spec = GraphSpec("g:S", "/", "ns", (ServiceSpec("VllmWorker", Role.DECODE, workers, 1),))
    config = {"VllmWorker": {"engine": engine, "model": "m", **options}}
    return check_memory(spec, config, gpus, is_simulated=not gpus)


def need(weights_gb: float, kv_gb: float, is_certain: bool = True, sequences: int = 1) -> MemoryNeed:
    token_bytes = kv_gb * GB / 400_000 / sequences
    return MemoryNeed(weights_gb * GB, token_bytes, 400_000, sequences, is_certain)


def test_what_fits_is_told_and_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, warnings = found(monkeypatch, need(1, 10))
    assert lines == [
        "VllmWorker: weights 1.0 GB + KV 10.0 GB (400000 tokens of 26.2 KiB) = 11.0 GB for its worker, "
        "of 24.0 GB of this box"
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
    assert "37.0 GB of KV entries and 0.1 GB of weights per worker; this box has 24.0 GB" in text
    assert "The longest context that fits is max-model-len: 258304." in text
    assert 0.1 + 37 * 258304 / 400_000 < 24 < 0.1 + 37 * 258560 / 400_000 + 0.02


def test_workers_share_weights_but_not_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, need(10, 5))[1] == []
    assert found(monkeypatch, need(8, 5), workers=2)[1] == []
    (warning,) = found(monkeypatch, need(8, 7), workers=2)[1]
    assert "all 2 workers need 22.0 GB; 20.0 GB of 24.0 GB are free now" in warning
    with pytest.raises(ConfigError, match=r"all 3 workers need 29\.0 GB; this box has 24"):
        found(monkeypatch, need(8, 7), workers=3)


def test_an_estimate_that_may_be_too_large_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = found(monkeypatch, need(1, 37, is_certain=False))[1]
    assert "this box has 24.0 GB. The longest context that fits" in warning
    (warning,) = found(monkeypatch, need(30, 1, is_certain=False))[1]
    assert "Not even the weights fit." in warning


def test_vllm_is_refused_what_its_gpus_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, need(16, 60), "vllm", H100)[1] == []
    with pytest.raises(
        ConfigError, match=r"its GPUs have 80\.0 GB for it\n.*max-model-len: .*kv-cache-dtype"
    ):
        found(monkeypatch, need(16, 70), "vllm", H100)


def test_llamacpp_leaves_on_the_cpu_what_its_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = found(monkeypatch, need(16, 70), gpus=H100)[1]
    assert "its GPUs have 80.0 GB" in warning
    with pytest.raises(ConfigError, match="this box has"):
        found(monkeypatch, need(16, 70), gpus=H100, **{"n-gpu-layers": 0})


def test_a_user_reads_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    monkeypatch.setattr("dynaplan.engines.common.requirements.check_installed", lambda *_: None)
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
    assert "VllmWorker: weights 0.0 GB + KV 0.0 GB (4 x 4096 tokens of 0.2 KiB)" in capsys.readouterr().out
