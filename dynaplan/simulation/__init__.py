"""A whole service in virtual time, the policies that scale it, and the best static split."""
