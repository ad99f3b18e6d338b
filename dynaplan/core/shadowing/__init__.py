"""Policies that never act: what they would have decided, and how the model says they would have fared."""
