"""The queueing model: the TTFT and ITL that a number of workers gives."""
