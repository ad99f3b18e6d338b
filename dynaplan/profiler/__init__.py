"""The program behind ``dynaplan profile-sla``: starts deployments, measures them, writes the results.

Words of the subject, and their homes:

- a *measurement* is one point of one engine (``domain.profiles.measurements``);
- a *sweep* is all measurements of one output directory (``session``, made of ``stage``s);
- a *profile* is the curves of one engine made of measurements (``core.engine.timing.MeasuredProfile``);
- ``core.profiling`` decides, without doing anything: loads to measure, choice of sizes, thresholds, plots;
- ``adapters.engines.sim.profiles`` reads profiles from files, ``adapters.profiles`` prepares them for sizing.
"""
