"""The laboratory: how much of a decode step is launch overhead on this machine, and how to reduce it."""
