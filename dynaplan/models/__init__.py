"""Many models behind one address: which are loaded, which leave, and who waits for how long.

**What a request meets.** A frontend loads nothing; the fleet plugin owns workers and GPUs, and so all loads::

    request -> gateway/frontend_models   by its name, aliases, adapters
                 | a worker is ready, with a free slot ------------------------------> it is answered
                 v
               gateway/model_queue       waits; demand (how many, since when) is published
                 v
    demand, orders of persons, workers that planners want, memory of all devices
                 v
               models/step               one pass of the plugin's reconciler, pure:
                 |   workers, shared_memory, sleepers    what is: a ModelStatus for each model
                 |   rules/planning                      what is wanted: a Plan, with its reasons
                 |   workers.desired_models              numbers of workers, and their places
                 v
               reports                   published: loading, ready, or refused with a sentence
                 |
                 +-> the queue: goes to the worker that has registered, or is answered 409, 503 or 429

**Who leaves.** A model is loaded where there is room now and later. Where there is none, others make it: as
few as can, of those that may leave by now, and the ones that are worth least (``rules/eviction``)::

    what it is doing                               leaves for another model
    ---------------------------------------------  ------------------------------------------------------
    further worker, prefill worker                 at once (rules/replicas)
    nothing                                        at once; it sleeps where that is enough (rules/ladder)
    answers, or has requests that wait for it      when the other's demand is overdue (rules/turns)
    min-stay, loading for somebody, just loaded    when that is over
    pinned                                         never

Without anybody who wants its memory a model leaves after its ``ttl``, or by its owner's word.

**Shapes.** On the way from file to answer there are three: what the owner wrote (``ServedModel`` with its
``OnDemandSettings``; ``ModelPolicy`` is that with what files and GPUs tell, by ``policies``), what is
(``ModelStatus``) and what the plan wants (``Plan``). What processes say to each other is in
``contract/model_keys``: demand and orders flow into a status, and a report is a view of one. ``deployed`` has
what the owner wrote, ``step`` what is remembered between passes; ``files`` reads other tools' configurations.
"""
