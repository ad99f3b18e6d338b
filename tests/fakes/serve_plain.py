"""``python -m tests.fakes.serve_plain [key=value ...]``: serves the plain graph without the command line.

Keys: port, gpus, drain, namespace, decode and prefill (workers), hang (decode workers' health-timeout),
supervise (seconds of grace: a supervisor starts it again when it is killed); and, with any value: never (the
decode worker can never start), loads (it never gets ready), engine (it has processes of its own and a file in
the scratch directory), tcp (circus on TCP).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynaplan.fleet.serve import ServeOptions, serve, serve_on
from dynaplan.graph.config import resolve_graph
from dynaplan.process.supervisor_link import fork_under_supervisor, inherited_link
from dynaplan.sdk import load_graph
from dynaplan.util.errors import UserError


def main(arguments: list[str]) -> int:
    given = dict(argument.split("=", 1) for argument in arguments)
    config = {
        "VllmWorker": {
            "ServiceArgs": {"workers": int(given.get("decode", 1))},
            "never-starts": "never" in given,
            "has-engine": "engine" in given,
            "loads-for-ever": "loads" in given,
            "health-timeout": float(given.get("hang", 30)),
        },
        "PrefillWorker": {"ServiceArgs": {"workers": int(given.get("prefill", 1))}},
    }
    graph = load_graph("tests.fakes.plain_graph:Entry", Path.cwd())
    options = ServeOptions(
        port=int(given.get("port", 0)),
        gpus=int(given.get("gpus", 8)),
        drain_timeout_s=float(given.get("drain", 5)),
        leave_timeout_s=float(given.get("drain", 5)),
        circus_tcp="tcp" in given,
    )
    spec, link = resolve_graph(graph, config, given.get("namespace", "plain")), None
    if grace := given.get("supervise"):
        link = inherited_link(os.environ)
        if link and (code := serve_on(link)) is not None:
            return code
        command = [sys.executable, "-m", "tests.fakes.serve_plain", *arguments]
        link = link or fork_under_supervisor(command, float(grace), options.drain_timeout_s)
    try:
        return serve(spec, config, options, link)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
