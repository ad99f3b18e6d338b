"""The frontend's view of the decode workers: choosing one for a request, and reserving a slot there."""
