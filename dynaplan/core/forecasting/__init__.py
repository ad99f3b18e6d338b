"""Forecasts of the load from its past: pure methods, their back-test, and the choice among them."""
