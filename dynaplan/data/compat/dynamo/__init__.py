"""Names of NVIDIA Dynamo for graphs and programs that are written against it; dynaplan does the work.

On the search path only where it was asked for: ``dynaplan serve --compat dynamo``, ``dynaplan compat``.
It has what a graph file imports (``dynamo.sdk``, ``dynamo.runtime.logging``), and for a program that carries
a planner's decisions out ``dynamo._core``; other modules of Dynamo are not here.
"""
