"""``dynaplan simulate``: its options, the policies that it compares, results as a table and as a web page."""
