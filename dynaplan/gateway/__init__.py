"""The OpenAI-compatible frontend; ``request_path`` is the page to begin with."""
