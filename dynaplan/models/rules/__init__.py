"""The decisions about many models, pure: memory, eviction, turns, and what they come to (``planning``)."""
