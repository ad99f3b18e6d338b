"""Workers that run an inference engine."""
