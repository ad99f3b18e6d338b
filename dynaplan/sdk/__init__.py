"""What a graph's author writes. Imports in milliseconds: no network, no engine, no numpy."""
