"""The clairvoyant oracle: the cheapest numbers of workers found for a trace that is known beforehand.

PROBLEM

Given are a trace of N requests (arrival time, prompt tokens, output tokens), a deployment (the step times of
its engines, G GPUs, and for each role r the GPUs g_r of one worker and its start-up time s_r in seconds), and
an SLO (a TTFT target, an ITL target, a percentile p).

Decision variables: n_r(w), the number of workers of role r that serve in window w; whole numbers from 1 on.
Roles are prefill and decode, or decode alone where decode workers compute the prompts too (aggregated).
Windows are equally long, whole seconds, at least 2 s, and at most 480 of them cover the trace
(``trace_arrays``). The number of workers changes at the edges of windows only.

Objective: the least GPU-seconds held until the last arrival,

    sum over r of g_r * ( sum over w of n_r(w) * length(w)
                          + sum over w > 0 of max(0, n_r(w) - n_r(w - 1)) * min(s_r, begin(w))
                          + drain_r )

The middle term is the price of a start: a worker that serves from t on is started s_r earlier, though not
before the trace, and holds its GPUs meanwhile. drain_r is the time for which workers that leave still answer
what they have. Workers of the first window are ready at once, as those of every policy are.

Constraints:

1. The SLO. With M = floor(N * (1 - p / 100)), at most M requests of the whole trace miss the TTFT target and
   at most M miss the ITL target. The targets are counted apart, so up to 2 M may miss one of them. A request
   that is never answered misses both; one of a single output token meets the ITL target. Nothing is asked of
   a single window: the M misses are spent where they save most.
2. The GPUs. In every window, workers that serve or start hold at most G GPUs.

METHOD

A simulation of the trace decides whether a schedule is feasible and what it costs, but takes seconds to
minutes, and there are up to 960 variables. So candidates are compared on quick models, and only few are
simulated:

1. Quick models (``pool_models``), one for each pool, count the requests that miss a target, window by window,
   in microseconds a request. They leave out paging of KV blocks, prompts in chunks, the router's choice and
   most of what one pool does to the other.
2. Static schedules (``SchedulePlanner.statics``): all that fit the GPUs are modelled. The smallest that the
   models take to be feasible is simulated first, so that there is a result to compare with.
3. A first schedule (``dynamic_programme``). Each miss of a target gets a price in GPU-seconds: the Lagrange
   multipliers of constraint 1 (Everett, "Generalized Lagrange Multiplier Method for Solving Problems of
   Optimum Allocation of Resources", Operations Research 11, 1963). At fixed prices the cost is a sum over
   windows and over changes between neighbours, so a dynamic programme over (window, number of workers) finds
   the least, for each pool by itself. The prices are found by bisection, the least at which no more than M
   miss. Where both pools together want more than G GPUs, the windows are capped at the cheapest split, and
   all is done again.
4. A local search (``local_search``) moves edges, lowers and raises stretches, and takes what pays at the
   prices. Every change is modelled from the first window that it touches until the windows after it miss what
   they missed before. Prices are adjusted between the rounds until nothing pays any more; what is left of the
   M misses is then spent on the best savings one by one.
5. The schedule is simulated. The limits of the quick models are tuned until they count as many misses as the
   simulation had, and step 4 goes on from the best schedule (``oracle``).
6. Static schedules that the models take to be infeasible, though not by far, may be feasible and cheaper:
   up to 4 of them are simulated last.

WHEN IT STOPS

A change is abandoned before it is modelled to its end when the misses so far cost 1.5 times what it saves
(``local_search.HOPELESS``). The search for one schedule ends when a round accepts no change and prices move
by less than a quarter, or its effort is spent. Effort is counted in passes of the trace through the models,
not in seconds, so that the same trace gives the same schedule on every machine. The whole ends after
``effort`` simulations, or when three searches in a row find only schedules that were simulated before; the
second and the third begin at a third of the prices, and at three times the prices, to leave a local minimum.

WHAT IT PROVES

The result was simulated as every policy is, so its schedule can be carried out: it is an upper bound of the
least cost. It is not proven to be the least. ``lower_bound`` relaxes the problem until it can be solved by
adding up, which no schedule goes below: the gap between the two holds the true minimum.

The constants of these modules are set by hand, none is derived: each one's docstring says what it trades.
"""
