"""Requests that kill workers do not make a worker `failed`; a worker that crashes by itself is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from dynaplan.fleet.rules.restarting import CrashLedger, after_exit
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.store.instance_keys import FORGIVEN_CRASHES
from tests.attack.test_poison import COMPLETIONS, POISON, Hospital, MortalWorker
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually


class Ward(Hospital):
    """Restarts its one worker by the rules of the fleet plugin, with what frontends say of its crashes."""

    def __init__(self, here: Stage) -> None:
        super().__init__(here, 1)
        self.ledger = CrashLedger()
        self.patient = Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, WorkerState.READY)
        self.crashes = 0

    async def keep(self) -> None:
        while True:
            await self._see()
            patient, now_s = self.patient, time.monotonic()
            if patient.state is WorkerState.BACKOFF and patient.retry_at_s <= now_s:
                await self._start(patient.moved(WorkerState.STARTING, now_s))
            elif patient.state is WorkerState.READY and not self.workers:
                await self._start(replace(patient, state=WorkerState.STARTING))
            await asyncio.sleep(0.005)

    async def _see(self) -> None:
        now_s = time.monotonic()
        if self.workers and self.workers[-1].dead and self.patient.pid:
            before, self.patient = self.patient, after_exit(self.patient, -6, now_s)
            self.crashes += 1
            self.ledger.note({"w": before}, {"w": self.patient})
            await self._here.store.delete(self._keys.pop(self.workers[-1]))
        keys = [item.key for item in await self._here.store.list(FORGIVEN_CRASHES.prefix("ns"))]
        forgiven = self.ledger.forgiven({"w": self.patient}, FORGIVEN_CRASHES.instances("ns", keys), now_s)
        self.patient = forgiven.get("w", self.patient)

    async def _start(self, starting: Worker) -> None:
        worker = MortalWorker("ns_VllmWorker")
        await worker.start()
        self.workers.append(worker)
        self._here.workers.append(worker)
        number = len(self.workers)
        instance = await worker.register(self._here.store, number)
        self._keys[worker] = instance.key
        await self._here.know(instance)
        ready = starting.moved(WorkerState.READY, time.monotonic())
        self.patient = replace(ready, pid=number, instance_id=number)


async def test_25_varied_poisons_do_not_make_a_worker_failed() -> None:
    """Each has a shape of its own, so that none is refused for another; half of the clients give up."""
    async with stage(served_model_name=MODEL) as here:
        ward = Ward(here)
        here.runtime.spawn(ward.keep(), "ward")
        await eventually(lambda: ward.patient.pid == 1)
        for number in range(25):
            crashes = ward.crashes
            asking = asyncio.create_task(
                here.post(COMPLETIONS, prompt="hi", max_tokens=1 + number, seed=number, **POISON)
            )
            await eventually(lambda crashes=crashes: ward.crashes > crashes, 10)
            if number % 2:
                await asyncio.sleep(0.05)  # the frontend hears of the death, too
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            else:
                assert (await asking)[0] == 500
            await eventually(lambda: ward.patient.state is WorkerState.READY, 10)
        assert ward.crashes >= 25
        assert (await here.post(COMPLETIONS, prompt="hi", max_tokens=8))[0] == 200


async def test_a_worker_that_crashes_without_a_suspect_still_fails() -> None:
    async with stage(served_model_name=MODEL) as here:
        ward = Ward(here)
        here.runtime.spawn(ward.keep(), "ward")
        for number in range(6):
            await eventually(lambda number=number: ward.patient.pid == number + 1, 20)
            assert (await here.post(COMPLETIONS, prompt=f"good {number}", max_tokens=8))[0] == 200
            ward.workers[-1].dead = True
            await eventually(lambda number=number: ward.crashes == number + 1)
        assert ward.patient.state is WorkerState.FAILED
