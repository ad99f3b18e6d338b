"""dynaplan: serve and scale an LLM inference graph on one multi-GPU box."""

__version__ = "0.1.0"
