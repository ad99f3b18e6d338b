"""The OpenAI-compatible frontend: from a request's bytes to its answer."""
