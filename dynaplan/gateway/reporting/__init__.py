"""Reports of a frontend to its operators: a line for each request, and the whole deployment's metrics."""
