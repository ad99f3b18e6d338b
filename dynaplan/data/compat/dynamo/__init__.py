"""The original's package, for graphs and programs written against Dynamo 0.3: its names, dynaplan's work.

On the search path only where it was asked for: ``dynaplan serve --compat dynamo``, ``dynaplan compat``.
It has ``dynamo.sdk`` and ``dynamo.runtime``, and ``dynamo.frontend`` and ``dynamo.vllm`` for ``python -m``;
other modules of the original are not here.
"""
