"""Another local user can drive nothing of a deployment, and no secret shows where others could look.

Every attempt is made twice: as the owner, who must succeed (else the test would prove nothing), and as
user nobody, who must not. Everybody may enter the directories above ours, and the two that were there
before for statefile and logs: what refuses is ours.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import another_user
from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of

SECRET = "sk-0123456789-very-secret"
QUIET = ("--Planner.no-operation=true",)
LOOPBACK = ("127.0.0.1", "::1")

Attempts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter; pytest's own are closed to others and would hide our mistakes."""
    directory = Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def running(open_directory: Path) -> Iterator[Deployment]:
    """A deployment with secrets in its environment, in its options, and in a worker's environment."""
    deployment = Deployment(
        open_directory,
        "graphs.disagg:Frontend",
        "disagg.yaml",
        *QUIET,
        "--VllmWorker.hf-token=" + SECRET,
        "--VllmWorker.ServiceArgs.envs.SOME_NAME=" + SECRET,
        environment={
            "MY_API_KEY": SECRET,
            "HARMLESS": SECRET,
            "DYNAPLAN_API_KEY": SECRET,
            "DYN_CIRCUS_LOG_DIR": str(open_directory / "logs"),
        },
    )
    for directory in (deployment.statefile_path.parent, open_directory / "logs" / "dynamo"):
        directory.mkdir(parents=True)
    deployment.runtime_base.chmod(0o755)
    with deployment:
        yield deployment.start()


@pytest.fixture(scope="module")
def plain(open_directory: Path) -> Iterator[Deployment]:
    """A deployment of services with endpoints of their own."""
    deployment = Deployment(open_directory, "graphs.hello_world:Frontend", "", namespace="hello")
    deployment.runtime_base.chmod(0o755)
    with deployment:
        yield deployment.start()


def clients_environment(deployment: Deployment) -> dict[str, str]:
    """The addresses and tokens of the deployment, which only its owner can read."""
    directory = Path(deployment.statefile()["addresses"]["runtime_dir"])
    return dict(json.loads((directory / "clients.json").read_text()))


def url_of(deployment: Deployment, watcher: str) -> str:
    """The worker's own HTTP server: where it listens, beside the public port."""
    process = psutil.Process(deployment.pid_of(watcher))
    ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    (port,) = ports - {int(deployment.url.rpartition(":")[2])}
    return f"http://127.0.0.1:{port}"


def attempt(name: str, do: Any, *arguments: Any) -> dict[str, Any]:
    return {"name": name, "do": do.__name__, "with": list(map(str_or_int, arguments))}


def str_or_int(value: Any) -> str | int:
    return value if isinstance(value, int) else str(value)


def attempts_on_files(deployment: Deployment) -> Attempts:
    runtime_dir = Path(deployment.statefile()["addresses"]["runtime_dir"])
    log_dir = Path(deployment.statefile()["addresses"]["log_dir"])
    directories = [runtime_dir, log_dir, deployment.statefile_path.parent]
    # One that is being written is there for a moment only.
    found = (path for each in directories for path in each.rglob("*") if path.suffix != ".tmp")
    files = [path for path in found if path.is_file()]
    assert {"clients.json", "launch.json", "nats.conf", "circus.log", "dynamo.json"} <= {
        path.name for path in files
    }
    pids = [child.pid for child in deployment.children()]
    assert deployment.process
    return [
        *(attempt(f"read {path}", another_user.read, path) for path in files),
        attempt(f"list {runtime_dir}", another_user.look_into, runtime_dir),
        *(attempt(f"write into {path}", another_user.write_into, path) for path in directories),
        *(attempt(f"environ of {pid}", another_user.read, f"/proc/{pid}/environ") for pid in pids),
        *(attempt(f"signal {pid}", another_user.send_signal, pid) for pid in [*pids, deployment.process.pid]),
    ]


def attempts_on_sockets(deployment: Deployment) -> Attempts:
    document = deployment.statefile()
    sockets = {
        "circus": document["circus_endpoint"].removeprefix("ipc://"),
        "circus events": document["addresses"]["circus_events"].removeprefix("ipc://"),
        "etcd": clients_environment(deployment)["ETCD_ENDPOINTS"].removeprefix("unix://"),
    }
    port = int(deployment.url.rpartition(":")[2])
    return [
        *(attempt(name, another_user.connect_unix, path) for name, path in sockets.items()),
        attempt("a share of the frontend's port", another_user.share_port, port),
    ]


def attempts_with_token(running: Deployment, plain: Deployment, token: str) -> Attempts:
    """What a token opens, tried with that one; "" for none, "right" for the right one."""

    def token_of(deployment: Deployment, name: str) -> str:
        return clients_environment(deployment)[name] if token == "right" else token

    nats_port = int(clients_environment(running)["NATS_SERVER"].rpartition(":")[2])
    decode, prefill = (url_of(running, f"dynamo_{each}") for each in ("VllmWorker", "PrefillWorker"))
    routes = [
        (running, "POST", f"{decode}/v1/chat/completions"),
        (running, "POST", f"{decode}/v1/completions"),
        (running, "POST", f"{prefill}/v1/completions"),
        (running, "POST", f"{prefill}/kv/some-request/take"),
        (plain, "POST", f"{url_of(plain, 'hello_Backend')}/generate"),
        (plain, "POST", f"{url_of(plain, 'hello_Frontend')}/generate"),
    ]
    worker = "DYNAPLAN_WORKER_TOKEN"
    return [
        attempt("NATS", another_user.publish, nats_port, token_of(running, "NATS_AUTH_TOKEN")),
        *(
            attempt(f"{method} {url}", another_user.request, method, url, token_of(each, worker))
            for each, method, url in routes
        ),
    ]


def outcomes(attempts: Attempts, user: str = "") -> dict[str, str]:
    """Make the attempts as that user, or as this one."""
    uid = [str(pwd.getpwnam(user).pw_uid)] if user else []
    result = subprocess.run(
        [sys.executable, "-I", "-S", another_user.__file__, *uid],
        input=json.dumps(attempts),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def granted(attempts: Attempts, user: str) -> list[str]:
    return [name for name, answer in outcomes(attempts, user).items() if answer == "granted"]


def refused(attempts: Attempts, user: str = "") -> dict[str, str]:
    return {name: answer for name, answer in outcomes(attempts, user).items() if answer != "granted"}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
def test_files_processes_and_sockets_are_the_owners_alone(running: Deployment) -> None:
    attempts = attempts_on_files(running) + attempts_on_sockets(running)
    assert refused(attempts) == {}
    assert granted(attempts, "nobody") == []


@needs_root
def test_nats_and_workers_ask_for_a_token_that_only_the_owner_can_read(
    running: Deployment, plain: Deployment
) -> None:
    assert refused(attempts_with_token(running, plain, "right")) == {}
    for token in ("", "wrong"):
        assert granted(attempts_with_token(running, plain, token), "nobody") == []


@needs_root
def test_what_circusctl_shows_of_a_workers_environment_is_behind_its_socket(running: Deployment) -> None:
    endpoint = running.statefile()["circus_endpoint"]
    circusctl = str(Path(sys.executable).with_name("circusctl"))
    command = [circusctl, "--endpoint", endpoint, "options", "dynamo_VllmWorker"]
    assert SECRET in subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    socket_path = endpoint.removeprefix("ipc://")
    assert granted([attempt("circus", another_user.connect_unix, socket_path)], "nobody") == []


def test_nothing_listens_beyond_loopback_and_etcd_on_no_port_at_all(running: Deployment) -> None:
    listening = {
        (process.name(), each.laddr.ip)
        for process in running.children()
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert {ip for _, ip in listening} <= set(LOOPBACK)
    assert "nats-server" in {name for name, _ in listening}
    assert "etcd" not in {name for name, _ in listening}


def test_no_secret_is_on_a_command_line_in_a_file_or_in_a_metric(running: Deployment) -> None:
    tokens = [value for name, value in clients_environment(running).items() if name.endswith("_TOKEN")]
    assert len(tokens) == 2
    secrets = [SECRET, *tokens]
    for where, text in shown_to_others(running).items():
        assert not [secret for secret in secrets if secret in text], where


def shown_to_others(deployment: Deployment) -> dict[str, str]:
    """What leaves the runtime directory: command lines, statefile, logs, metrics, what the tools print."""
    private = Path(deployment.statefile()["addresses"]["runtime_dir"])
    workers = ("VllmWorker", "PrefillWorker", "Frontend", "Planner")
    urls = [deployment.url, *(url_of(deployment, f"dynamo_{each}") for each in workers)]
    pages = {f"{url}/{page}": get(f"{url}/{page}") for url in urls for page in ("metrics", "health")}
    pages |= {f"{url}/load_metrics": get(f"{url}/load_metrics") for url in urls[1:]}
    tools = (["status"], ["status", "--json"], ["why"], ["logs", "dynamo_VllmWorker"])
    typed = serve_of(deployment)  # its command line, like that of its supervisor, is what the user has typed
    started = [child for child in deployment.children() if child != typed]
    return {
        **{f"argv of {child.pid}": " ".join(child.cmdline()) for child in started},
        **{
            str(path): path.read_text(errors="replace")
            for path in deployment.directory.rglob("*")
            if path.is_file() and not path.is_relative_to(private)
        },
        **pages,
        **{" ".join(tool): deployment.run(*tool).stdout for tool in tools},
        "banner": deployment.text,
    }


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {SECRET}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())
