"""Where llama.cpp's HTTP server runs: in this process, by xllamacpp, or as a llama-server child."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from pathlib import Path
from typing import Any, Protocol

from dynaplan.adapters.engines.common.child import EngineChild, exit_words, is_up
from dynaplan.adapters.engines.common.kinds import real_gpus
from dynaplan.adapters.engines.common.server_client import ServerClient
from dynaplan.adapters.engines.common.server_engine import START_TIMEOUT_S
from dynaplan.adapters.engines.llamacpp.options import LlamaOptions, server_flags, set_fields
from dynaplan.adapters.local.claims import node_dir
from dynaplan.adapters.local.port_leases import PortLease, lease_ports
from dynaplan.domain.engine import EngineContext
from dynaplan.domain.errors import TemporaryError, WorkerStartFailed
from dynaplan.domain.masking import mask_secrets

log = logging.getLogger(__name__)

VERBOSITY = 1
"""llama.cpp's level for errors: two warnings come with every prompt that was prefilled elsewhere."""

TERM_GRACE_S = 5.0
"""An idle llama-server ends in milliseconds; one with requests stalls them and does not end."""


class Host(Protocol):
    """One llama.cpp server on a port of 127.0.0.1."""

    @property
    def url(self) -> str:
        """Its base address, certain once it has started."""
        ...

    async def start(self) -> None:
        """Return when it answers; raises WorkerStartFailed or TemporaryError when it does not come up."""
        ...

    async def exited(self) -> str:
        """Return when it has ended: how, in words."""
        ...

    def kill(self) -> None:
        """End it at once, as far as that can be done from here."""
        ...

    async def stop(self, *, is_idle: bool) -> None:
        """End it. ``is_idle`` says that it has no request: only then can it be asked to."""
        ...


def make_host(options: LlamaOptions, context: EngineContext, start_timeout_s: float | None) -> Host:
    """The host that the options choose, not started; ``start_timeout_s`` is None when nobody chose one."""
    if options.server:
        return ChildHost(options, context, START_TIMEOUT_S if start_timeout_s is None else start_timeout_s)
    return EmbeddedHost(options, context, has_start_timeout=start_timeout_s is not None)


class EmbeddedHost:
    """The xllamacpp package's server: threads of this process, none of which holds Python's lock.

    Loading does hold it: until the model is there this process does nothing else, not even end on SIGTERM. So
    there is no ``start-timeout`` either: nothing here could end the loading.
    A crash of the engine is one of the process.
    """

    def __init__(
        self, options: LlamaOptions, context: EngineContext, *, has_start_timeout: bool = False
    ) -> None:
        self._options = options
        self._context = context
        self._has_start_timeout = has_start_timeout
        self._server: Any = None
        self._url = ""

    @property
    def url(self) -> str:
        """Its base address."""
        return self._url

    async def start(self) -> None:
        """Load the model; the only point at which the reason of a failure is known is the log."""
        import xllamacpp

        # Without this a crash would start a debugger on this process, if there is one.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        params = xllamacpp.CommonParams()
        self._fill(params, xllamacpp)
        if self._has_start_timeout:
            log.warning("start-timeout has no effect: nothing can end the loading within a process")
        log.info("loading %s: this process does nothing else until it is there", self._options.model)
        try:
            self._server = await asyncio.to_thread(_kept_server, params)
        except RuntimeError as error:
            # Memory of a GPU may be about to be freed; a file that does not load here never will.
            failed = TemporaryError if real_gpus(os.environ) else WorkerStartFailed
            raise failed(
                f"llama.cpp does not load {self._options.model}: {error}",
                hint="Its reason is in the log above.",
            ) from error
        self._url = self._server.listening_address

    async def exited(self) -> str:
        """Never returns: this process would be gone."""
        await asyncio.Event().wait()
        return ""

    def kill(self) -> None:
        """Nothing: it ends with the process."""

    async def stop(self, *, is_idle: bool) -> None:
        """Drop the server when that is safe, else leave it to the end of the process."""
        held, self._server = [self._server], None
        if held[0] is None:
            return
        if not is_idle or _has_connections(int(self._url.rpartition(":")[2])):
            log.warning("llama.cpp still has requests or connections: it ends with this process")
            return
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(held[0]))
        await asyncio.to_thread(held.clear)

    def _fill(self, params: Any, enums: Any) -> None:
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.endpoint_metrics = params.endpoint_slots = True
        params.ui = False
        params.verbosity = VERBOSITY
        if self._context.token:
            params.api_keys = [self._context.token]
        if self._context.scratch_dir:
            params.slot_save_path = _with_slash(self._context.scratch_dir)
        set_fields(params, self._options, enums)


class ChildHost:
    """The llama-server program as a child of this process."""

    def __init__(self, options: LlamaOptions, context: EngineContext, start_timeout_s: float) -> None:
        self._options = options
        self._context = context
        self._start_timeout_s = start_timeout_s
        self._child: EngineChild | None = None
        self._lease: PortLease | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Its base address."""
        return self._url

    async def start(self) -> None:
        """Start it on a leased port and wait for its ``/health``."""
        self._lease = lease_ports(1, node_dir(os.environ))
        (port,) = self._lease.ports
        self._url = f"http://127.0.0.1:{port}"
        argv = command(self._options, self._context, port)
        log.info("starting llama-server: %s", " ".join(mask_secrets(argv)))
        token = self._context.token
        key = {"LLAMA_API_KEY": token} if token else {}
        environment = {**key, **self._options.environment}
        child = self._child = EngineChild.spawn(argv, environment, self._lease.descriptors, token)
        client = ServerClient(self._url, token)
        try:
            if not await is_up(child, client, "/health", "llama-server", self._start_timeout_s):
                raise TemporaryError(
                    f"llama-server ended while it was starting; its last lines:\n{child.last_lines()}"
                )
        finally:
            await client.close()

    async def exited(self) -> str:
        """How it ended, and its last lines."""
        if self._child is None:
            return "does not run"
        code = await self._child.exited()
        return f"{exit_words(code)}\n{self._child.last_lines()}"

    def kill(self) -> None:
        """SIGKILL to its process group."""
        if self._child is not None:
            self._child.kill()

    async def stop(self, *, is_idle: bool) -> None:
        """SIGTERM, but SIGKILL at once to one with requests: told to end it only lets their clients hang."""
        child, self._child = self._child, None
        try:
            if child is not None:
                await child.stop(TERM_GRACE_S if is_idle else 0)
        finally:
            if self._lease is not None:
                self._lease.close()
                self._lease = None


def _kept_server(params: Any) -> Any:
    """The server, with a reference that nobody drops by accident, not even the end of the interpreter.

    Dropping it while a request runs would wait for that with Python's lock held: for ever. With a request
    half received it would crash.
    """
    import xllamacpp

    server = xllamacpp.Server(params)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return server


def command(options: LlamaOptions, context: EngineContext, port: int) -> tuple[str, ...]:
    """The command line of one llama-server; its key is in the environment."""
    words = [str(Path(options.server).expanduser()), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--metrics", "--slots", "--no-webui"]
    if context.scratch_dir:
        words += ["--slot-save-path", _with_slash(context.scratch_dir)]
    return (*words, *server_flags(options))


def _with_slash(directory: str) -> str:
    """llama.cpp puts the file's name right behind it."""
    return directory.rstrip("/") + "/"


def _has_connections(port: int) -> bool:
    """Whether anybody is connected to that port of this process."""
    import psutil

    try:
        connections = psutil.Process().net_connections("tcp")
    except psutil.Error:
        return True
    return any(
        each.laddr and each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in connections
    )
