"""Observe, decide, act: the planner of a deployment, as a service of its graph or on its own.

How a decision comes about, in order, and where each formula stands. T is the adjustment interval, L the
start-up time of a worker, both in s.

**Observe.** ``rules/cycle.py`` is the loop, the same for the live planner (``loop.py``) and a simulated
one: a metric pull every ``metric-pulling-interval``, an Observation every T (``observer.py``; its sources are
in ``metrics``).

1. *Traffic* since the last interval: requests, lengths, latencies, arrivals per pull. Their dispersion:
   ``forecasting/arrivals.py``.
2. *Forecast* for 1 interval ahead, for L + T, and half way: ``sizing/demand_forecast.py`` over
   ``forecasting/forecaster.py``, by a Kalman filter unless another predictor is named (``kalman.py``).
3. *Backtest*, every five minutes in a process of its own: the cheapest split of workers that, standing still,
   would have kept the promise on the traffic of ``slo-window`` (``backtesting/search.py``; the evidence and
   how the present load compares: ``evidence.py``; when: ``schedule.py``). Once in a window it tries other
   options of the engines, too (``backtesting/option_trials.py``).

**Decide.** ``rules/decision.py``: ``decide(settings, state, observation, model) -> (state, decision)``. Pure
and total; each stage leaves a step in the decision's trail. With targets (``rules/sla_policy.py``):

4. *Error budget*: requests that may still miss without breaking the promise over ``slo-window``, an account
   that is shown: ``sizing/error_budget.py``.
5. *Corrections*: factors of step times, refitted by the last backtest: ``backtesting/record.py``.
6. *Demands* between L and L + T, the backlog of the prefill queue among them: ``sizing/look_ahead.py``.
7. *Size* of each demand: the fewest workers with chance(TTFT > target) and chance(ITL > target) within the
   promised parts: ``sizing/pool_sizes.py``. The chances come from ``sizing/queueing/queueing_model.py``:
   ``prefill_model.py`` is a multi-server queue with batches, ``decode_model.py`` an infinite-server queue
   with feedback, ``workload.py`` gives the work of a demand, ``waiting.py`` the textbook's formulas.
8. *Limits*: minimums and GPU budget (``sizing/limits.py``), who leaves and who is added by the backtest
   (``rules/backtest_rules.py``), failed roles (``rules/guards.py``).

Before 4, *tuning*: what is set of running workers besides their number (``rules/tuning.py``), which are the
most requests that run on one at once (``sizing/running_limit.py``) and the length up to which decode workers
compute prompts (``sizing/local_prefill.py``).

``sizing: formula`` puts the formulas of Dynamo's planner in place of 6 to 8 (``sizing/formula.py``). The
policy ``load`` has thresholds in place of 4 to 8 (``rules/load_policy.py``), ``both`` has them above a floor
that 4 to 8 find. Bounds that a person has set (holds) come last.

**Act.** The connector asks for the desired counts (``virtual/connector.py``, ``kubernetes/connector.py``),
the publisher tells frontends of the tuning (``virtual/tuning_publisher.py``), and recorders write the
decision down (``recorders``), from which ``replay.py`` decides again.
"""
