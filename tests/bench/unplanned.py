"""An aggregated graph without a planner: what is idle there is everything but the planner."""

from dynaplan.services import Frontend, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker)
