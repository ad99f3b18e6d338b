"""The cheapest schedule of worker counts that meets the targets, found with the whole trace known."""
