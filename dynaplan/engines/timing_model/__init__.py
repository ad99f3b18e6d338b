"""The model of an inference engine: requests, KV blocks, steps and how long they take."""
