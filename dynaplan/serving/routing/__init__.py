"""The frontend's view of the decode workers: which one gets a request, and what it has promised."""
