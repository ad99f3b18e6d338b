"""From an observation to a decision: the policies, their guards, and the words that explain them."""
