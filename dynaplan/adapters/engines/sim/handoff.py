"""Remote prefill of the simulated engine: prompts held for others, and prompts taken from others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from aiohttp import web

from dynaplan.adapters.engines.common.holds import HOLD_S
from dynaplan.core.engine.hand_off import hand_off_s

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from dynaplan.adapters.engines.sim.api import RemoteKv

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 5.0


class HandOffs:
    """The computed prompts that a worker holds for decode workers, each for at most ``HOLD_S``.

    ``address`` is the base URL of this worker's HTTP server, ``release`` frees the blocks of one hand-off.
    """

    def __init__(self, worker_name: str, address: str, release: Callable[[str], None]) -> None:
        self._worker_name = worker_name
        self._address = urlsplit(address)
        self._release = release
        self._held: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._leaving: set[str] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self.expired = 0

    @property
    def held(self) -> int:
        """How many wait to be taken."""
        return len(self._held)

    def hold(self, hand_off_id: str, tokens: int, blocks: int) -> Mapping[str, Any]:
        """Hold a computed prompt; its ``kv_transfer_params``, with vLLM's names."""
        timer = asyncio.get_running_loop().call_later(HOLD_S, self._expire, hand_off_id)
        self._held[hand_off_id] = tokens, timer
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._worker_name,
            "remote_request_id": hand_off_id,
            "remote_host": self._address.hostname,
            "remote_port": self._address.port,
            "remote_block_ids": [list(range(blocks))],  # the model counts blocks, it does not number them
            "remote_num_tokens": tokens,
        }

    async def take(self, http: web.Request) -> web.Response:
        """``POST /kv/{request_id}/take``: the KV entries are read; 404 when they are not held (any more).

        They are let go when the answer is on its way: a drain waits for that.
        """
        hand_off_id = http.match_info["request_id"]
        if hand_off_id not in self._held or hand_off_id in self._leaving:
            return web.json_response({"error": f"no KV entries are held for '{hand_off_id}'"}, status=404)
        self._leaving.add(hand_off_id)
        response = web.json_response({"tokens": self._held[hand_off_id][0]})
        try:
            await response.prepare(http)
            await response.write_eof()
        finally:
            self._drop(hand_off_id)
        return response

    def drop_all(self) -> None:
        """Let go of all of them: nobody will take them."""
        for hand_off_id in list(self._held):
            self._drop(hand_off_id)

    async def drained(self) -> None:
        """Return when nothing is held."""
        while self._held:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _drop(self, hand_off_id: str) -> None:
        self._leaving.discard(hand_off_id)
        tokens_and_timer = self._held.pop(hand_off_id, None)
        if tokens_and_timer is None:
            return
        tokens_and_timer[1].cancel()
        self._release(hand_off_id)
        if not self._held:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _expire(self, hand_off_id: str) -> None:
        log.warning("nobody took the KV entries of %s within %.0f s; letting go", hand_off_id, HOLD_S)
        self.expired += 1
        self._drop(hand_off_id)


class KvFetcher:
    """Takes computed prompts from other workers of this machine, at the pace of a real transfer."""

    def __init__(self, speedup_ratio: float, worker_token: str) -> None:
        self._speedup_ratio = speedup_ratio
        self._headers = {"Authorization": f"Bearer {worker_token}"} if worker_token else {}
        self._session: ClientSession | None = None
        self.on_the_way = 0
        self.taken = 0
        self.fallbacks = 0
        self.asked_tokens = 0
        self.transfer_s = 0.0

    async def fetch(self, source: RemoteKv, prompt_tokens: int) -> bool:
        """Take the prompt's KV entries; False when they are not to be had: compute them here."""
        self.asked_tokens += prompt_tokens
        self.on_the_way += 1
        try:
            if not await self._take(source) or source.tokens != prompt_tokens:
                self.fallbacks += 1
                return False
            await self._transfer(prompt_tokens)
        finally:
            self.on_the_way -= 1
        self.taken += 1
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _take(self, source: RemoteKv) -> bool:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=TAKE_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        host = f"[{source.host}]" if ":" in source.host else source.host
        url = f"http://{host}:{source.port}/kv/{quote(source.request_id, safe='')}/take"
        try:
            async with self._session.post(url, allow_redirects=False) as response:
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("cannot take KV entries from %s: %s; computing them here", url, error)
            return False
        if status != 200:
            log.warning("%s answered %d; computing the prompt here", url, status)
        return status == 200

    async def _transfer(self, tokens: int) -> None:
        if not self._speedup_ratio:
            return
        seconds = hand_off_s(tokens) / self._speedup_ratio
        self.transfer_s += seconds
        await asyncio.sleep(seconds)
