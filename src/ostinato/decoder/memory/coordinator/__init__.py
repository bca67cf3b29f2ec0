"""One face for every kind of memory (`interface.py`): attention, windowed attention, recurrent, or two at once.

The decoder talks to `interface.Memory` and never asks which kind it has (MC-8).
"""
