"""The whole service in virtual time: engines, routing, prefill queue, workers that start and leave."""
