"""Calls of endpoints: from the choice of an instance to the last item of its answer."""
