"""The fields of requests that each engine takes, with bounds, as data for the frontends.

An engine that checks for itself (vLLM, SGLang, TensorRT-LLM) has a list of what is refused or bounded, so
that every other field of its own works. llama.cpp has a list of all that is let through: it aborts on some.
"""
