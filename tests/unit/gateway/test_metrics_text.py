"""The text of metrics, and the sums over files of several processes: as ``prometheus_client`` makes them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from dynaplan.gateway.metrics_text import SharedFiles, exposition_text

AWKWARD = 'a "quoted" \\ name\nof two lines, é'


def test_the_text_is_that_of_the_client_library() -> None:
    registry = CollectorRegistry()
    Counter("sent", AWKWARD, ("model", "a"), registry=registry).labels(AWKWARD, "").inc(1234567.5)
    gauge = Gauge("load", "about", ("model",), registry=registry)
    for model, value in (("inf", math.inf), ("less", -math.inf), ("nan", math.nan), ("small", 1e-9)):
        gauge.labels(model).set(value)
    Gauge("plain", "about", registry=registry).set(3)
    histogram = Histogram("took", "about", ("model",), registry=registry, buckets=(0, 0.5, 1e7))
    histogram.labels("m").observe(0.3)
    metrics = [each for each in registry.collect() if not each.name.endswith("_created")]
    for metric in metrics:
        metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
    for _ in range(2):
        assert exposition_text(metrics) == generate_latest(_Fixed(metrics))  # type: ignore[arg-type]


class _Fixed:
    def __init__(self, metrics: list[Metric]) -> None:
        self.collect = metrics.copy


PROCESS = """
import sys
from prometheus_client import Counter, Gauge, Histogram
number = int(sys.argv[1])
Counter("sent", "about", ("model", "kind")).labels("m", 'a "b"').inc(number)
Gauge("load", "about", ("model",), multiprocess_mode="livesum").labels("m").set(number)
Gauge("size", "about", ("model",), multiprocess_mode="livemax").labels("m").set(-number)
histogram = Histogram("took", "about", ("model",), buckets=(0.5, 2, 10))
for model in ("m", "n"):
    for took in range(number):
        histogram.labels(model).observe(took)
if number == 3:
    Counter("late", "about").inc()
"""


def run(directory: Path, number: int) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    subprocess.run([sys.executable, "-c", PROCESS, str(number)], env=environment, check=True)


def flat(metrics: object) -> dict[tuple[object, ...], float]:
    return {
        (metric.name, metric.type, sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in metrics  # type: ignore[attr-defined]
        for sample in metric.samples
    }


def test_the_sums_over_files_are_those_of_the_client_library_also_when_a_process_has_come(
    tmp_path: Path,
) -> None:
    shared = SharedFiles(tmp_path, {"sent": "the help text"})
    seen = 0
    for number in (1, 2, 3):
        run(tmp_path, number)
        sums = flat(shared.collect())
        library = MultiProcessCollector(None, str(tmp_path))  # type: ignore[no-untyped-call]
        assert sums == flat(library.collect())  # type: ignore[no-untyped-call]
        assert len(sums) >= seen
        seen = len(sums)
    (about,) = (each.documentation for each in shared.collect() if each.name == "sent")
    assert about == "the help text"


def test_a_file_that_another_process_has_just_made_is_empty_and_counts_nothing(tmp_path: Path) -> None:
    run(tmp_path, 1)
    files = SharedFiles(tmp_path, {})
    before = flat(files.collect())
    (tmp_path / "counter_1.db").touch()
    assert flat(files.collect()) == before
