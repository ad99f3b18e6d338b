"""Decisions: from an observation to the desired numbers of workers, with policies, guards, explanations."""
