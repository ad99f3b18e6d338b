"""The Frontend alone on a watched loop: ``python -m tests.bench.held_loop PORT OPTIONS WORKER_PORT ...``.

For each line on its input it prints the longest turn of the loop since the line before, in ms of CPU: for
that long all other streams stood still. It is asyncio's own loop, slower than uvloop, which has no such hook.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from tests.bench.data_path.frontend import serve


class WatchedLoop(asyncio.SelectorEventLoop):
    """Knows its longest turn. To wait for something takes no CPU."""

    longest_s = 0.0

    def _run_once(self) -> None:
        begun_s = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - begun_s)

    def report(self) -> None:
        sys.stdin.readline()
        print(1000 * self.longest_s, flush=True)
        self.longest_s = 0.0


async def watched(loop: WatchedLoop) -> None:
    loop.add_reader(sys.stdin, loop.report)
    port, options, *workers = sys.argv[1:]
    await serve(int(port), json.loads(options), [int(each) for each in workers])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(watched(runner.get_loop()))  # type: ignore[arg-type]
