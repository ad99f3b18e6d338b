"""The surroundings that a worker gives its engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineContext:
    """The surroundings of one worker's engine.

    ``role`` is ``decode`` (aggregated workers too) or ``prefill``. ``address`` is the base URL of the
    worker's own HTTP server. ``token`` is the bearer token of the frontends, and the engine's API key.
    ``gpus`` is the worker's ``resources.gpu``: a whole number, or a fraction of one GPU. ``scratch_dir`` is
    a directory in memory, the same for all workers of the deployment; a worker's own files there begin with
    ``{worker_name}.`` and are removed when it is gone. ``tells_blocks``: the engine is to tell the worker
    which KV blocks it stores and removes.
    """

    worker_name: str
    role: str = "decode"
    address: str = ""
    token: str = field(default="", repr=False)
    gpus: float = 0
    scratch_dir: str = ""
    tells_blocks: bool = False
