"""``dynaplan bench``: load on a running deployment, beside its simulation."""
