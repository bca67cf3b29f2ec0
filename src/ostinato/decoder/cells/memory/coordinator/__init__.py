"""One interface for every kind of memory (`interface.py`): attention, windowed attention, recurrent, or two at once.

The decoder uses `interface.Memory` and does not depend on its kind (MC-8).
"""
