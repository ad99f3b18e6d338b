"""The kubelet's part: pods on paper, or pods that are processes of this machine."""

from __future__ import annotations

import signal
from typing import Protocol

from dynaplan.kubernetes.client import Object
from tests.fakes import pods


class Kubelet(Protocol):
    """Runs pods by name; ``address`` is that of all of them, "" when each has one of its own."""

    address: str

    def start(self, name: str, template: Object) -> None:
        """Begin a pod."""

    def is_ready(self, name: str) -> bool:
        """Tell whether its readiness probe is well."""

    def has_ended(self, name: str) -> bool:
        """Tell it to end, once; tell whether it has."""


class PaperKubelet:
    """Nothing runs: a pod is ready at once, and ends at once."""

    address = ""

    def start(self, name: str, template: Object) -> None:
        pass

    def is_ready(self, name: str) -> bool:
        return True

    def has_ended(self, name: str) -> bool:
        return True


class ProcessKubelet:
    """Runs pods as ``tests.fakes.pods`` does; ``exit_codes`` are those of the ones that have ended."""

    def __init__(self, cluster: pods.Cluster) -> None:
        self.exit_codes: dict[str, int] = {}
        self._cluster = cluster
        self._told: set[str] = set()

    @property
    def address(self) -> str:
        return self._cluster.address

    def start(self, name: str, template: Object) -> None:
        self._cluster.pods[name] = pods.Pod(name, template, self._cluster)
        self._cluster.pods[name].start()

    def is_ready(self, name: str) -> bool:
        return self._cluster.pods[name].is_well("readinessProbe")

    def has_ended(self, name: str) -> bool:
        process = self._cluster.pods[name].process
        assert process
        if name not in self._told:
            self._told.add(name)
            process.send_signal(signal.SIGTERM)
        if process.poll() is None:
            return False
        self.exit_codes[name] = process.returncode
        return True
