"""``python -m tests.chaos.schedules --seed 17``, or ``--from 0 --count 10000``."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

from tests.chaos.schedules.schedule import run_schedule

COLLECT_EVERY = 20
"""Schedules between two collections of what is left of them."""

EVERY = 100
"""Schedules between two lines that say how far it is."""


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a schedule
        command = [sys.executable, "-m", "tests.chaos.schedules", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.schedules")
    parser.add_argument("--seed", type=int, help="repeat this one, and tell its story")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count) if options.seed is None else [options.seed]
    gc.disable()  # by itself it takes a fifth of the time
    begun_s, failed = time.monotonic(), []
    for seed in seeds:
        outcome = run_schedule(seed)
        if options.seed is not None:
            print("\n".join(outcome.story))
            print(f"{outcome.requests} requests, {outcome.failed} not whole, {outcome.lasted_s:.0f} s")
        if outcome.wrong:
            failed.append(seed)
            print(f"seed {seed}:\n  " + "\n  ".join(outcome.wrong[:8]), flush=True)
        if not seed % COLLECT_EVERY:
            gc.collect()
        if not (seed + 1 - seeds[0]) % EVERY:
            print(f"{seed + 1 - seeds[0]} in {time.monotonic() - begun_s:.0f} s", flush=True)
    print(f"{len(seeds)} schedules in {time.monotonic() - begun_s:.0f} s, wrong: {failed}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
