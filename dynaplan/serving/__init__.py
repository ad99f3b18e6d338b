"""The stock services that graphs link: Frontend, Processor, Router, VllmWorker, PrefillWorker, Planner."""
