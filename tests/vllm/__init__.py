"""vLLM's CPU build with a tiny random model: ``tox -e vllm``."""
