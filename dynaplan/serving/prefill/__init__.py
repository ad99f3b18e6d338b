"""Remote prefill: the queue between the frontend and the prefill workers, and the hand-off."""
