"""Disaggregated, with the Router choosing the decode worker."""

from dynaplan.planner.service import Planner
from dynaplan.services import Frontend, PrefillWorker, Processor, Router, VllmWorker

Frontend.link(Processor).link(Router).link(VllmWorker).link(PrefillWorker)
Frontend.link(Planner)
