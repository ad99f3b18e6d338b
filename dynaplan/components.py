"""The stock services as ``dynaplan frontend`` and ``dynaplan worker`` run them: linked, without a planner."""

from dynaplan.services import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)  # type: ignore[attr-defined]
