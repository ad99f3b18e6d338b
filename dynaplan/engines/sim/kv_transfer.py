"""Remote prefill of the simulated engine: prompts held for others, and prompts taken from others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from dynaplan.engines.held_hand_offs import HeldHandOffs
from dynaplan.engines.timing_model.step_timing import hand_off_s
from dynaplan.http.client import HttpClient
from dynaplan.http.messages import Request, Response

if TYPE_CHECKING:
    from dynaplan.engines.sim.api import RemoteKv

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 5.0


class HeldPrompts:
    """The computed prompts that a worker holds until decode workers take them here.

    ``address`` is the base URL of this worker's HTTP server, ``release`` frees the KV blocks of one prompt.
    """

    def __init__(self, worker_name: str, address: str, release: Callable[[str], None]) -> None:
        self._worker_name = worker_name
        self._address = urlsplit(address)
        self._release = release
        self._tokens: dict[str, int] = {}
        self.holds = HeldHandOffs(self._free)

    def hold(self, hand_off_id: str, tokens: int, blocks: int) -> Mapping[str, Any]:
        """Hold a computed prompt; return the ``kv_transfer_params`` to fetch it by, with vLLM's names."""
        self._tokens[hand_off_id] = tokens
        self.holds.hold(hand_off_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._worker_name,
            "remote_request_id": hand_off_id,
            "remote_host": self._address.hostname,
            "remote_port": self._address.port,
            **({"remote_scheme": "https"} if self._address.scheme == "https" else {}),
            "remote_block_ids": [list(range(blocks))],  # the model counts blocks, it does not number them
            "remote_num_tokens": tokens,
        }

    async def take(self, http: Request) -> Response | None:
        """Answer ``POST /kv/{request_id}/take`` of a decode worker, and release the prompt.

        404 when it is not held. The prompt's blocks are freed when the answer is on its way: a drain waits
        for that.
        """
        hand_off_id = http.fields["request_id"]
        tokens = self._tokens.pop(hand_off_id, None)
        if tokens is None:
            return Response.json({"error": f"no KV entries are held for '{hand_off_id}'"}, 404)
        try:
            await http.connection.respond(http, Response.json({"tokens": tokens}))
        finally:
            self.holds.release(hand_off_id)
        return None

    def release(self, request_id: str) -> None:
        """Free the prompts that were computed for that request; one that is being taken stays."""
        for hand_off_id in [each for each in self._tokens if each.rpartition(".")[0] == request_id]:
            self.holds.release(hand_off_id)

    def _free(self, hand_off_id: str) -> None:
        self._tokens.pop(hand_off_id, None)
        self._release(hand_off_id)


class KvFetcher:
    """Takes computed prompts from other workers of this machine, at the pace of a real transfer."""

    def __init__(self, speedup_ratio: float, worker_token: str) -> None:
        self._speedup_ratio = speedup_ratio
        # Of this machine: a certificate may hold only the name that others use.
        self._http = HttpClient(worker_token, tls=False)
        self.in_transfer = 0
        self.taken = 0
        self.fallbacks = 0
        self.asked_tokens = 0
        self.transfer_s = 0.0

    async def fetch(self, source: RemoteKv, prompt_tokens: int) -> bool:
        """Take the prompt's KV entries; False when that fails, and the prompt has to be computed here."""
        self.asked_tokens += prompt_tokens
        self.in_transfer += 1
        try:
            if not await self._take(source) or source.tokens != prompt_tokens:
                self.fallbacks += 1
                return False
            await self._transfer(prompt_tokens)
        finally:
            self.in_transfer -= 1
        self.taken += 1
        return True

    async def close(self) -> None:
        """Close the connections to other workers' KV servers, if there are any."""
        await self._http.close()

    async def _take(self, source: RemoteKv) -> bool:
        host = f"[{source.host}]" if ":" in source.host else source.host
        url = f"{source.scheme}://{host}:{source.port}/kv/{quote(source.request_id, safe='')}/take"
        try:
            status = (await self._http.request("POST", url, timeout_s=TAKE_TIMEOUT_S)).status
        except OSError as error:
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
