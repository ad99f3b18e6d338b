"""A simulated engine: answers in the time that a measured profile says."""
