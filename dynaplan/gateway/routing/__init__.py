"""Routing: the choice of the worker that gets a request, and the bookings that it depends on."""
