"""The choice of a worker for a request, pure.

The gateway makes it for live requests, the simulation for simulated ones in virtual time.
"""
