"""The load generator of ``bench`` and ``profile-sla``: prompts, streamed requests, open and closed loops."""
