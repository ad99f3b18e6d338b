"""A kubelet for one machine without containers: runs the pods of manifests as processes, asks their probes.

Copies of the real one: a container's command is ``command`` with ``args``, its environment is ``env`` with
fields of the pod, keys of a Secret and plain values; volumes of ConfigMaps are directories with a file
of each key, or of each item at its path; a probe is well when the answer's code is from 200 to 399. A
pod that is deleted gets ``preStop``, then SIGTERM. Other than there, all pods have the address of this
machine, so every one gets ports of its own, the name of a Service is that address, and paths are below
``directory``.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynaplan.util.sockets import free_port
from tests.fakes.polling import PATIENCE_S, wait_until

Manifest = dict[str, Any]
BINARIES = Path(sys.executable).parent


class Pod:
    """One pod of a Deployment: its only container is a process."""

    def __init__(self, name: str, template: Manifest, cluster: Cluster) -> None:
        self.name = name
        self.spec = template["spec"]
        self.container: Manifest = self.spec["containers"][0]
        self._cluster = cluster
        self.log = cluster.directory / f"{name}.log"
        self.ports = {each["containerPort"]: cluster.port_for(each["containerPort"]) for each in self._ports}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def _ports(self) -> list[Manifest]:
        return list(self.container["ports"])

    def start(self) -> Pod:
        command = [*self.container["command"], *self.container["args"]]
        words = [self._cluster.here(word, self) for word in command]
        words[0] = str(BINARIES / words[0])
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._cluster.directory)}
        environment |= {each["name"]: self._value(each) for each in self.container["env"]}
        environment |= self._cluster.account if "serviceAccountName" in self.spec else {}
        if cache := os.environ.get("PYTHONPYCACHEPREFIX"):
            environment["PYTHONPYCACHEPREFIX"] = cache
        for volume in self.spec["volumes"]:
            self._cluster.mount(volume, self)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, env=environment, cwd=self._cluster.directory, stdout=log, stderr=log
            )
        return self

    def is_well(self, probe: str) -> bool:
        """Ask a probe once."""
        asked = self.container[probe]["httpGet"]
        number = next(each["containerPort"] for each in self._ports if each["name"] == asked["port"])
        url = f"http://{self._cluster.address}:{self.ports[number]}{asked['path']}"
        try:
            with urllib.request.urlopen(
                url, timeout=self.container[probe].get("timeoutSeconds", 1)
            ) as answer:
                return 200 <= int(answer.status) < 400
        except (urllib.error.URLError, OSError):
            return False

    def ready(self) -> Pod:
        def is_ready() -> bool:
            assert self.process
            assert self.process.poll() is None, self.log.read_text()
            return self.is_well("readinessProbe")

        try:
            wait_until(is_ready)
        except AssertionError as error:
            raise AssertionError(f"{self.name} is not ready:\n{self.log.read_text()[-3000:]}") from error
        return self

    def delete(self) -> int:
        """End it as the kubelet does, and return its exit code."""
        assert self.process
        if hook := self.container.get("lifecycle"):
            subprocess.run(hook["preStop"]["exec"]["command"], check=True, timeout=PATIENCE_S)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_S)

    def _value(self, variable: Manifest) -> str:
        if variable["name"] == "DYNAPLAN_ADVERTISE_PORT":
            return str(self.ports[int(variable["value"])])
        if "value" in variable:
            return self._cluster.here(variable["value"], self)
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            key = source["secretKeyRef"]
            return str(self._cluster.object("Secret", key["name"])["stringData"][key["key"]])
        fields = {
            "status.podIP": self._cluster.address,
            "metadata.name": self.name,
            "metadata.namespace": "default",
            "metadata.uid": "0-1-2-3",
        }
        return fields[source["fieldRef"]["fieldPath"]]


class Cluster:
    """The objects that were applied, and the pods that run of them.

    ``account`` are variables by which a pod with an account reaches the API server, in the place of its
    token.
    """

    def __init__(
        self,
        documents: Sequence[Manifest],
        directory: Path,
        address: str,
        account: Mapping[str, str] | None = None,
    ) -> None:
        self.documents = documents
        self.directory = directory
        self.address = address
        self.account = dict(account or {})
        self.pods: dict[str, Pod] = {}
        self._service_ports: dict[str, int] = {}

    def object(self, kind: str, name: str) -> Manifest:
        (found,) = (
            each for each in self.documents if (each["kind"], each["metadata"]["name"]) == (kind, name)
        )
        return found

    def pod(self, deployment: str) -> Pod:
        """Start a pod of a Deployment."""
        template = self.object("Deployment", deployment)["spec"]["template"]
        name = f"{deployment}-{len(self.pods)}"
        self.pods[name] = Pod(name, template, self)
        for number, port in self.pods[name].ports.items():
            self._service_ports[f"{deployment}:{number}"] = port
        return self.pods[name].start()

    def port_for(self, number: int) -> int:
        return free_port()

    def here(self, text: str, pod: Pod) -> str:
        """The text with this machine's addresses, ports and directories in it."""
        for service, port in self._service_ports.items():
            text = text.replace(service, f"{self.address}:{port}")
        for number, port in pod.ports.items():
            text = text.replace(f"port={number}", f"port={port}").replace(
                f"port: {number}\n", f"port: {port}\n"
            )
            text = text.replace(f"http: {number}\n", f"http: {port}\n")
        for path in self._mounts(pod):
            text = text.replace(path, str(self._place(pod, path)))
        return text

    def mount(self, volume: Manifest, pod: Pod) -> None:
        mounts = pod.container["volumeMounts"]
        path = next(each["mountPath"] for each in mounts if each["name"] == volume["name"])
        place = self._place(pod, path)
        place.mkdir(parents=True, exist_ok=True)
        if source := volume.get("configMap"):
            stored = self.object("ConfigMap", source["name"])
            texts = {key: self.here(text, pod).encode() for key, text in stored.get("data", {}).items()}
            files = {key: base64.b64decode(text) for key, text in stored.get("binaryData", {}).items()}
            contents = {**texts, **files}
            items = source.get("items") or [{"key": key, "path": key} for key in contents]
            for item in items:
                (place / item["path"]).parent.mkdir(parents=True, exist_ok=True)
                (place / item["path"]).write_bytes(contents[item["key"]])

    def _mounts(self, pod: Pod) -> list[str]:
        return [each["mountPath"] for each in pod.container["volumeMounts"]]

    def _place(self, pod: Pod, path: str) -> Path:
        return self.directory / pod.name / path.lstrip("/")


@contextmanager
def running(
    documents: Sequence[Manifest], directory: Path, address: str, account: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster with these objects; its pods end with the block."""
    cluster = Cluster(documents, directory, address, account)
    try:
        yield cluster
    finally:
        for pod in cluster.pods.values():
            if pod.process and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()
