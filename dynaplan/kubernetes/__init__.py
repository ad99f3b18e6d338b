"""Whatever needs a cluster: the key-value store in its API, the planner's connector, and what is exported.

Nothing below imports it: planner and store find it by the entry points ``dynaplan.connectors`` and
``dynaplan.stores``.
"""
