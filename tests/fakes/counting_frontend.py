"""A frontend's ``/metrics`` on an ephemeral port, with the counts that a test makes.

It copies the real one by being it: ``FrontendMetrics`` writes the text. A new process (``restart``) counts
from 0, on the same address.
"""

from __future__ import annotations

from aiohttp import web

from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.metrics import FrontendMetrics


class CountingFrontend:
    """Counts requests of namespace ``ns``; silent while it ``is_silent``. Its time passes by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_silent = False
        self.scrapes = 0
        self._runner: web.AppRunner | None = None
        self.restart()

    def restart(self) -> None:
        """Another process in its place."""
        self.metrics = FrontendMetrics("ns", lambda: self.now_s)
        self.metrics.describe_model("m", True, {})

    async def start(self) -> str:
        """Listen; the base address."""
        application = web.Application()
        application.router.add_get("/metrics", self._render)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self.url

    @property
    def url(self) -> str:
        assert self._runner
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner:
            await self._runner.cleanup()

    def answer(
        self, times: int = 1, isl: int = 300, osl: int = 50, ttft_s: float = 0.5, model: str = "m"
    ) -> None:
        """So many streams, one after the other; their first tokens after ``ttft_s``, all others at once."""
        for _ in range(times):
            record = self.metrics.record(model, "completions", is_stream=True)
            self.now_s += ttft_s
            record.observe(1)
            record.finish("", isl, Usage(isl, osl))

    async def _render(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        if self.is_silent:
            return web.Response(status=503)
        return web.Response(body=self.metrics.render(), content_type="text/plain")
