"""Model families: what they are (`shape.py`), what they are made of (`blocks.py`), one short file for each.

Nothing here schedules, samples or knows a request; `registry.py` is the way in.
"""
