"""Aggregated, with the Router choosing the worker."""

from dynaplan.planner.service import Planner
from dynaplan.services import Frontend, Processor, Router, VllmWorker

Frontend.link(Processor).link(Router).link(VllmWorker)
Frontend.link(Planner)
