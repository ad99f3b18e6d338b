"""Traffic in bursts, which no forecast sees: everything that the SLA policy does about it.

The learnt floor (``standing.py``, ``fluid.py``, ``burst_floor.py``), exchange and surprises
(``burst_floor.py``, ``surprises.py``), and the hedge (``hedging.py``, ``experts.py``, ``interval.py``,
``lived.py``, ``evidence.py``). Pure: no I/O, clock, logging or randomness.

**The seam.** These places know of it; setup.cfg names the three imports that go up for them:

- ``planner/rules/sla_policy.py`` makes a ``BurstPolicy`` (``burst_policy.py``) in each decision: ``observe``
  before sizing, ``adjust`` after it, ``hedge`` after patience.
- ``planner/model.py``: ``PlannerState.bursts`` is the memory (``memory.py``), with the keys
  ``standing`` and ``hedge`` of a state in ``decisions.jsonl``.
- ``planner/sizing/demand_forecast.py`` fills ``Expected.surprise`` by ``surprises.py``.
- ``planner/assembly.py``, from above: the memory fades when a planner starts.

Without this folder these have no purpose: the options ``hedge`` and ``learnt-floor``
(``config/settings/planner.py``), ``Expected.surprise``, ``Forecast.outcomes``, and of the error budget
``is_overspent`` and ``kept_s``.
"""
