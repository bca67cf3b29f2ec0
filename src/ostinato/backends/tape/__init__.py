"""The tape: one kernel that runs the whole decode loop while its weights stream by.

`partition.py` says which block has which weights and in what order, `pack.py` puts them there; the headers are the
kernel.
"""
