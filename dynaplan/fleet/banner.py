"""The banner: the lines that the user reads when a deployment starts."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dynaplan.fleet.launch import Launch
from dynaplan.fleet.page_access import PAGE_PATH, page_url
from dynaplan.graph.lifecycle import Role


def banner(launch: Launch, is_simulated: bool, store: str = "", page: str = "") -> str:
    """Return the addresses and directories, the circusctl line, and one request to try.

    ``store`` is where the key-value store is; empty for the usual one, which is not named. ``page`` is where
    the web page is; empty where there is none.
    """
    kind = "simulated GPUs" if is_simulated else "GPUs"
    frontend = launch.graph.of_role(Role.FRONTEND)
    rows = [
        ("graph", f"{launch.graph.identifier}, namespace {launch.namespace}, {len(launch.gpus)} {kind}"),
        ("URL", launch.frontend_url),
        *([("page", page)] if page else []),
        ("logs", str(launch.log_dir)),
        ("statefile", str(launch.statefile)),
    ]
    if store:
        rows.append(("store", store))
    if launch.graph.of_role(Role.PLANNER):
        rows.append(("TensorBoard", f"tensorboard --logdir {tensorboard_dir(launch)}"))
    rows.append(("circus", f"circusctl --endpoint {launch.circus_endpoint} status"))
    if frontend:
        rows.append(("try", curl(launch)))
    else:
        rows += [("try", line) for line in own_curls(launch)]
    return "\n".join(["dynaplan serve (Ctrl-C to stop)", *(f"  {name:<12} {text}" for name, text in rows)])


def page_line(launch: Launch, secret: str, *, is_private: bool) -> str:
    """Return the address of the web page; empty when no Frontend has it.

    It holds the token where it ``is_private``: on a terminal. A file that the output goes to may be open to
    others, so the command that prints the address stands there.
    """
    frontend = launch.graph.of_role(Role.FRONTEND)
    if not frontend or not secret or not launch.settings_of(frontend.name).get("page", True):
        return ""
    if is_private:
        return page_url(launch.frontend_url, secret)
    return (
        f"`dynaplan ui --namespace {launch.namespace}` prints the address of {launch.frontend_url}{PAGE_PATH}"
    )


def tensorboard_dir(launch: Launch) -> str:
    """Return the line about the directory of the planner's curves."""
    return str(launch.config.get("Planner", {}).get("log-dir") or launch.log_dir / "planner")


def curl(launch: Launch) -> str:
    """A request that the Frontend answers."""
    body: dict[str, Any] = {"model": model_name(launch.config), "stream": True, "max_tokens": 32}
    body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    url = f"{launch.frontend_url}/v1/chat/completions"
    data = shlex.quote(json.dumps(body))
    return f"{_curl(launch)} {url}{_key(launch)} -H 'Content-Type: application/json' -d {data}"


def own_curls(launch: Launch) -> list[str]:
    """A request for each endpoint that the graph's own services offer to users.

    Its body is empty: an endpoint that needs fields answers with their names.
    """
    names = [name for service in launch.graph.services for name in service.public_endpoints]
    header = " -H 'Content-Type: application/json'" + _key(launch)
    return [f"{_curl(launch)} {launch.frontend_url}/{name}{header} -d '{{}}'" for name in names]


def _curl(launch: Launch) -> str:
    """Return the command: the certificate of the Frontend is hardly one for an address of this machine."""
    return "curl -kN" if launch.is_tls else "curl -N"


def _key(launch: Launch) -> str:
    return ' -H "Authorization: Bearer $DYNAPLAN_API_KEY"' if launch.is_protected else ""


def model_name(config: dict[str, dict[str, Any]]) -> str:
    """The model as the configuration names it; a placeholder when it does not."""
    sections = [config.get("Frontend", {}), config.get("Common", {}), *config.values()]
    for key in ("served_model_name", "served-model-name", "model"):
        for section in sections:
            if isinstance(section.get(key), str):
                return str(section[key])
    return "MODEL"
