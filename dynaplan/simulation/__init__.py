"""A whole service in virtual time, the policies that scale it, and the best that any policy could do."""
