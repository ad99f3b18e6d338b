"""What the load will be, from what it was: pure methods, their back-test, and the choice among them."""
