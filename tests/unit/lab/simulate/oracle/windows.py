"""Windows of 5 s for the tests of schedules."""

from dynaplan.lab.simulate.oracle.schedule import WindowTiming


def timing(count: int, startup_s: float = 10.0, gpus: int = 1) -> WindowTiming:
    return WindowTiming(width_s=5, windows=count, end_s=5.0 * count, gpus=gpus, startup_s=startup_s)
