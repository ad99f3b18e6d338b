"""What another local user of the machine may try; run on its own: ``python -I -S another_user.py [UID]``.

Reads a JSON list of attempts from standard input, drops to that uid when one is given, makes each attempt
and prints a JSON object: name -> "granted", or why it was refused. Standard library only: whatever it
needs is imported before the privileges are dropped.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  socket looks for it when it is first used
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 5.0


def connect_unix(path: str) -> str:
    """Connect to a unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(path)
    return "granted"


def publish(port: int, token: str) -> str:
    """Publish on the NATS server of that loopback port."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client, client.makefile("rb") as answers:
        answers.readline()
        hello = json.dumps({"auth_token": token, "verbose": False} if token else {"verbose": False})
        client.sendall(f"CONNECT {hello}\r\nPUB v1.test 2\r\nhi\r\nPING\r\n".encode())
        answer = answers.readline().decode().strip()
    return "granted" if answer == "PONG" else answer or "the connection was closed"


def request(method: str, url: str, token: str = "") -> str:
    """An HTTP request; everything but 401 and 403 counts as granted."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection.request(method, parts.path, b"{}" if method == "POST" else None, headers)
    status = connection.getresponse().status
    connection.close()
    return f"status {status}" if status in (401, 403) else "granted"


def read(path: str) -> str:
    """Read a file."""
    with open(path, "rb") as file:
        file.read(1)
    return "granted"


def look_into(path: str) -> str:
    """List a directory."""
    os.listdir(path)
    return "granted"


def write_into(path: str) -> str:
    """Make a file in a directory."""
    name = os.path.join(path, "intruder")
    with open(name, "w"):
        pass
    os.unlink(name)
    return "granted"


def send_signal(pid: int) -> str:
    """Whether the process would take a signal from us; none is sent."""
    os.kill(pid, 0)
    return "granted"


def share_port(port: int) -> str:
    """Listen on the same port, as a frontend of the deployment does, and so get some of its requests."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
    return "granted"


ATTEMPTS: dict[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        *(connect_unix, publish, request, read),
        *(look_into, write_into, send_signal, share_port),
    )
}


def outcome(attempt: dict[str, Any]) -> str:
    """What became of one attempt."""
    try:
        return ATTEMPTS[attempt["do"]](*attempt["with"])
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"


def main(arguments: list[str]) -> None:
    attempts = json.load(sys.stdin)
    if arguments:
        os.setgroups([])
        os.setgid(int(arguments[0]))
        os.setuid(int(arguments[0]))
    json.dump({each["name"]: outcome(each) for each in attempts}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
