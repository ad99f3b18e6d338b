"""The clairvoyant oracle: the cheapest numbers of workers found for a trace that is known beforehand.

SYMBOLS, the same in every module of this package

    N               requests of the trace, lost ones included (lost: no engine could ever serve them)
    p, M            the percentile of the SLO; M = floor(N * (1 - p / 100)), the misses allowed of a target
    G, g_r          GPUs of the box; GPUs of one worker of role r
    s_r             start-up time of a worker of role r, in seconds
    w, W            a window, 0 ... W - 1, and the number of windows
    length(w), begin(w)     seconds of a window, and from the beginning of the trace to its begin
    n_r(w)          the *level*: workers of role r that serve in window w, without starting and leaving ones
    P               the most prompts that a prefill worker holds, computing or not; at least 1
    T(t)            milliseconds of a prefill step with one prompt of t tokens; T(0) is its fixed part
    D(b, kv)        milliseconds of a decode step of b requests with kv tokens of context together
    a *miss*        a request that misses the TTFT target, or the ITL target; the two are counted apart
    E               the user's ``effort``: the most simulations of schedules
    a *pass*        N + 8 W requests modelled: the unit of effort (``WHEN IT STOPS``)

PROBLEM

Given are a trace of N requests (arrival time, prompt tokens, output tokens), a deployment (T and D of its
engines, G, and g_r, s_r for each role), and an SLO (a TTFT target, an ITL target, p).

Decision variables: n_r(w); whole numbers from 1 on. Roles are prefill and decode, or decode alone where
decode workers compute the prompts too (aggregated). Windows are equally long, whole seconds, at least 2 s,
and at most 480 of them cover the trace (``trace_arrays``). Levels change at the edges of windows only.

Objective: the least GPU-seconds held until the last arrival, for *filled* levels

    sum over r of g_r * ( sum over w of n_r(w) * length(w)
                          + sum over w > 0 of max(0, n_r(w) - n_r(w - 1)) * min(s_r, begin(w))
                          + drain_r )

Levels are filled (``schedule.filled``) when no worker leaves and is needed again within s_r: it would hold
its GPUs for the next start all that time, and the middle term would charge more than is held. The middle term
is the price of a start: a worker that serves from begin(w) on is started s_r earlier, though not before the
trace, and holds its GPUs meanwhile. On filled levels that min is always s_r, because a worker that serves
within the first start-up time then serves from 0 on; it binds in the dynamic programme only, which fills its
levels afterwards: there begin(w) is what serving from 0 costs. drain_r are the worker-seconds, until the last
arrival, for which workers that leave still answer what they have. Workers of the first window are ready at
once and pay no start, as those of every policy are.

After the last arrival GPUs cost nothing: the last levels stay until all is answered. So the oracle may let
work slip behind the last arrival as far as the SLO allows, as every other policy may.

Constraints:

1. The SLO. At most M requests of the whole trace miss the TTFT target and at most M miss the ITL target. The
   targets are counted apart, so up to 2 M may miss one of them. A request's ITL is the mean over its answer.
   A request that is never answered (lost, or refused because too many wait) misses both; one of a single
   output token meets the ITL target. So a search may let M less the lost requests miss; the quick models
   know of no refusals. Nothing is asked of a single window: the misses are spent where they save most.
2. The GPUs. In every window, workers that serve or start hold at most G GPUs. Workers that leave are not
   planned for: in the simulation they hold their GPUs too, and a start that finds none free waits until one
   is. Such a worker serves later than planned; its requests may miss, and the simulation counts that.

METHOD

A simulation of the trace decides whether a schedule is feasible and what it costs, but takes seconds to
minutes, and there are up to 960 variables. So candidates are compared on quick models, and only few are
simulated:

1. Quick models (``pool_models``), one for each pool, count the misses, window by window, in microseconds a
   request. They leave out paging of KV blocks, prompts in chunks, the router's choice and most of what one
   pool does to the other. Where prefixes are cached, what a prompt costs is measured by simulations, with
   the router and the caches that the service has (``prompt_costs``): one for each number of workers, which
   do not count as effort, and then the one of each schedule.
2. Static schedules (``SchedulePlanner.statics``): all that fit the GPUs are modelled. The smallest that the
   models take to be feasible is simulated first, so that there is a result to compare with; at most 3, until
   one is feasible.
3. A first schedule (``dynamic_programme``). Each miss gets a price in GPU-seconds: the Lagrange multipliers
   of constraint 1 (Everett, "Generalized Lagrange Multiplier Method for Solving Problems of Optimum
   Allocation of Resources", Operations Research 11, 1963). At fixed prices the cost is a sum over windows and
   over changes between neighbours, so a dynamic programme over (window, level) finds the least, for each pool
   by itself. The prices are found by bisection, the least at which no more than M miss
   (``schedule_planner``). Where both pools together want more than G GPUs, the windows are capped at the
   cheapest split, and all is done again, at most 6 times.
4. A local search (``local_search``) moves edges, lowers and raises stretches, and takes what pays at the
   prices. Every change is modelled from the first window that it touches until the windows after it miss what
   they missed before. Prices are adjusted between the rounds until nothing pays any more; what is left of the
   M misses is then spent on the best savings one by one.
5. The schedule is simulated. The limits of the quick models are tuned until they count as many misses as the
   simulation had (``oracle``): they then agree on the number of misses, not on which requests miss. Step 4
   goes on from this schedule while it is not feasible, and from the best one otherwise.
6. Static schedules that the models take to be infeasible, though not by far (``oracle.DOUBT``), may be
   feasible and cheaper: up to 4 of them are simulated last.

WHEN IT STOPS

A change that saves GPU-seconds is abandoned before it is modelled to its end when the misses so far cost 1.5
times what it saves (``local_search``, which has the rule for every kind of search). Effort is counted in
passes, not in seconds, so that the same trace gives the same schedule on every machine: a pass is N + 8 W
requests modelled in the decode pool (N without the lost ones), where one in the prefill pool counts 0.15 and
a window 8. To model the whole schedule of two pools once costs 1.15 passes. The first search may take 6 E
passes and every later one 2 E, and as many again for its last step, the spending of misses. A search ends
before when a round accepts no change and prices move by less than a quarter, from the fifth round on.

The whole ends after E simulations (those of step 2 included, those of step 6 not), or when a search finds a
schedule that was simulated before.

WHAT IT PROVES

The result was simulated as every policy is, so its schedule can be carried out. Where it meets the SLO it is
an upper bound of the least cost; it is not proven to be the least. ``lower_bound`` relaxes the problem until
it can be solved by adding up. Where its assumptions hold (``WHERE IT HOLDS`` there), no schedule goes below
it, and the gap between the two holds the true minimum. Where no simulated schedule meets the SLO, the result
is the one with the most requests that meet both targets: no upper bound, and no proof either that none meets
it. All this is about the simulator's engines: T and D come from a profile, not from the box.

The constants of these modules are set by hand, none is derived: each one's docstring says what it trades.
"""
