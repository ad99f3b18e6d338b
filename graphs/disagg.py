"""Disaggregated: prefill workers compute prompts, decode workers take their KV blocks over and decode."""

from dynaplan.planner.service import Planner
from dynaplan.services import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)
Frontend.link(Planner)
