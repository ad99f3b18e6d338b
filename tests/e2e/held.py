"""The processes of a deployment under its supervisor, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.e2e.deployment import Deployment
from tests.fakes.polling import eventually


def serve_of(deployment: Deployment) -> psutil.Process | None:
    """The ``serve`` under the supervisor that runs now, once its fleet plugin does."""
    assert deployment.process
    try:
        below = psutil.Process(deployment.process.pid).children()
        lines = {each: each.cmdline() for each in below}
        next(line for line in lines.values() if any("FleetPlugin" in word for word in line))
        return next(each for each, line in lines.items() if "serve" in line)
    except (StopIteration, psutil.Error):
        return None


async def kill_serve(deployment: Deployment) -> None:
    """Kill ``serve``, and wait until the one that its supervisor starts has adopted what runs."""
    serve, adoptions = await eventually(lambda: serve_of(deployment)), deployment.text.count("Adopted")
    serve.kill()
    await eventually(lambda: deployment.text.count("Adopted") > adoptions)


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none of one that is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(part.partition("=")[::2] for part in text.split("\0") if part)
