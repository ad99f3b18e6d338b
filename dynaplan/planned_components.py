"""The stock services of ``components`` with a planner: for models that have planners of their own."""

from dynaplan.planner.service import Planner
from dynaplan.services import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)  # type: ignore[attr-defined]
Frontend.link(Planner)  # type: ignore[attr-defined]
