"""What the processes of a deployment say to each other: frozen types, keys and wire forms.

No I/O here, no clock, and nothing of who writes or reads: gateway, fleet and planner all stand on it.
"""
