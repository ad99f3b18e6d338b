"""One simulated machine: its processes, circus, the statefile, and the programs that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from random import Random
from signal import SIGTERM
from typing import Any

from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import ArbiterBusy, StatefileUnwritable
from tests.chaos.judging import Judge
from tests.chaos.schedules.lines import StoreServer
from tests.chaos.schedules.network import Network
from tests.chaos.schedules.virtual_time import Process, VirtualLoop
from tests.fakes.circus import FakeCircus
from tests.fakes.clock import LoopClock
from tests.fakes.memory_messenger import MemoryMessenger

Main = Callable[[Process], Coroutine[Any, Any, None]]
KILLED = -9
CIRCUS_ANSWERS_S = 10.0
"""As long ``CircusClient`` waits for an answer."""


class Machine:
    """All that runs, and what a schedule can do to it. ``wrong`` gathers what must never be seen."""

    def __init__(self, loop: VirtualLoop, network: Network, dice: Random) -> None:
        self.loop = loop
        self.network = network
        self.dice = dice
        self.store = StoreServer(dice)
        self.messenger = MemoryMessenger(LoopClock())
        self.processes: dict[int, Process] = {}
        self.dead: list[Process] = []
        self.circus = MemoryCircus(self)
        self.statefile = MemoryStatefile()
        self.workers: dict[int, Any] = {}
        self.plugin: Any = None
        self.skew_s = 0.0
        self.judge = Judge()
        self.codes: list[tuple[str, int]] = []
        """The exit codes of the processes that have ended."""
        self.lagging: list[Any] = []
        self.wrong: list[str] = []
        self.story: list[str] = []
        self._last_pid = 100

    def tell(self, text: str) -> None:
        self.story.append(f"{self.loop.time() - 1000:8.3f} {text}")

    @property
    def is_lagging(self) -> bool:
        """True while some process hears of the store late."""
        return any(line.lag_s for line in self.lagging)

    def spawn(self, name: str, main: Main, gpus: tuple[str, ...] = ()) -> Process:
        """Start a process."""
        self._last_pid += 1
        process = Process(self.loop, self._last_pid, name)
        process.gpus = gpus
        for other in self.processes.values():
            if both := set(gpus) & set(other.gpus):
                self.wrong.append(f"{name} and {other.name} ({other.pid}) have {sorted(both)}")
        self.processes[process.pid] = process
        process.start(self._live(process, main))
        return process

    async def _live(self, process: Process, main: Main) -> None:
        code = 1
        try:
            code = await main(process) or 0  # type: ignore[func-returns-value]
        except Exception as error:
            self.loop.faults.append(f"{process.name} crashed: {error!r}")
        if not process.is_dead:
            self.end(process, code)

    def kill(self, process: Process) -> None:
        """kill -9."""
        self.end(process, KILLED)

    def end(self, process: Process, code: int) -> None:
        """The process is gone; circus tells the plugin a moment later, or never."""
        if process.is_dead:
            return
        process.end()
        self.codes.append((process.name, code))
        self.judge.harmed(self.loop.time(), process.name)
        self.network.lose(process)
        self.processes.pop(process.pid, None)
        self.workers.pop(process.pid, None)
        self.dead.append(process)
        self.circus.ended(process)
        if self.dice.random() > 0.1:
            self.loop.call_later(self.dice.uniform(0, 0.4), self._tell_plugin, process.pid, code)

    def _tell_plugin(self, pid: int, code: int) -> None:
        plugin = self.plugin
        if plugin and not plugin.process.is_dead and plugin.reconciler:
            plugin.process.post(plugin.reconciler.record_exit, pid, code)

    def of(self, service: str, *, awake: bool = False) -> list[Process]:
        """The living processes of a service."""
        return [
            each
            for each in self.processes.values()
            if service in each.name and not (awake and each.is_frozen)
        ]

    # -- ports.box.Processes -------------------------------------------------------------------

    def identify(self, pid: int) -> int | None:
        return pid * 10 if pid in self.processes else None

    def identity_of(self, pid: int) -> ProcessIdentity:
        return ProcessIdentity(pid, pid * 10, "boot")

    def is_alive(self, process: ProcessIdentity) -> bool:
        return process.pid in self.processes

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        process = self.processes.get(pid)
        if process is None or pid * 10 != started_at:
            return ()
        self.tell(f"the plugin kills {process.name} ({pid})")
        self.kill(process)
        return (pid,)

    def oom_kills(self) -> tuple[int, str]:
        return 0, "this machine"


class MemoryCircus(FakeCircus):
    """circus, whose watchers start simulated processes; every command takes its time.

    Of the real one, and its client, is copied: while the arbiter stands still, commands wait, and those whose
    sender has given up are carried out too; commands to a ``serve`` that is killed are lost.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.start: Callable[[str, str, dict[str, str]], Process] | None = None
        self.is_silent = False
        self._waiting: list[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []

    async def pid(self, name: str) -> int:
        return int(await self._answered(partial(super().pid, name)))

    async def add(self, name: str, cmd: str, args: list[str], options: dict[str, Any]) -> int:
        return int(await self._answered(partial(self._add, name, cmd, args, options)))

    async def _add(self, name: str, cmd: str, args: list[str], options: dict[str, Any]) -> int:
        if name not in self.pids and self.start and self.can_start:
            service = args[args.index("--service-name") + 1]
            process = self.start(name, service, options["env"])
            self.environments[name] = options["env"]
            self.pids[name] = process.pid
            return process.pid
        return await super().add(name, cmd, args, options)

    async def remove(self, name: str) -> None:
        await self._answered(partial(self._remove, name))

    async def _remove(self, name: str) -> None:
        if self.pids.get(name) in self._machine.processes:
            self._machine.wrong.append(f"the watcher {name} is removed while its process runs")
        await super().remove(name)

    async def signal(self, name: str, signal_number: int) -> None:
        await self._answered(partial(self._signal, name, signal_number))

    async def _signal(self, name: str, signal_number: int) -> None:
        await super().signal(name, signal_number)
        worker = self._machine.workers.get(self.pids.get(name, 0))
        if worker and signal_number == SIGTERM:
            worker.process.post(worker.leave, "SIGTERM arrived")

    async def statuses(self) -> dict[str, str]:
        return dict(await self._answered(super().statuses))

    async def call(self, command: str, **properties: Any) -> dict[str, Any]:
        return dict(await self._answered(partial(self._call, properties["name"])))

    async def _call(self, name: str) -> dict[str, Any]:
        return {"options": {"env": self.environments.get(name, {}), "args": []}}

    def ended(self, process: Process) -> None:
        """Its process is gone: the watcher stays, without one."""
        for name, pid in self.pids.items():
            if pid == process.pid:
                self.pids[name] = 0

    async def speak(self) -> None:
        """Carry out what waits, in its order, and answer at once from now on."""
        while self._waiting:
            command, answer = self._waiting.pop(0)
            result = await asyncio.gather(command(), return_exceptions=True)
            if answer.done():
                continue
            if isinstance(result[0], BaseException):
                answer.set_exception(result[0])
            else:
                answer.set_result(result[0])
        self.is_silent = False

    def begin_anew(self, names: Collection[str]) -> None:
        """Be that of a new ``serve``, which adopts the processes of these names, and ends the others."""
        self.is_silent, self._waiting = False, []
        for name, pid in self.pids.items():
            if name not in names and (process := self._machine.processes.get(pid)):
                self._machine.kill(process)
        self.pids = {name: pid for name, pid in self.pids.items() if pid}

    async def _answered(self, command: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(self._machine.dice.uniform(0.001, 0.05))
        if not self.is_silent:
            return await command()
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        try:
            async with asyncio.timeout(CIRCUS_ANSWERS_S):
                return await answer
        except TimeoutError:
            raise ArbiterBusy("circus did not answer") from None


class MemoryStatefile:
    """``ports.box.DocumentStore``; the disk can be full."""

    def __init__(self) -> None:
        self.document: dict[str, Any] | None = None
        self.is_full = False

    def read(self) -> dict[str, Any] | None:
        return self.document

    def write(self, document: dict[str, Any]) -> None:
        if self.is_full:
            raise StatefileUnwritable("no space left on device")
        self.document = document

    def remove(self) -> None:
        self.document = None
