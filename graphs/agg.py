"""Aggregated: every worker prefills and decodes."""

from dynaplan.planner.service import Planner
from dynaplan.services import Frontend, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker)
Frontend.link(Planner)
