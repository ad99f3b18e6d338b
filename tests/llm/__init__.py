"""A small real language model through the whole stack: ``tox -e llm``."""
