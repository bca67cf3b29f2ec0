"""Runs requests: admits them, feeds the loop's inbox, drains its outbox, reuses prefixes, counts.

`engine.py` is the face, `scheduler.py` the thread behind it, `placement.py` where a model runs; `work.py` is what is
asked beside answers, `texts.py` and `saved.py` who ask it. Token ids in, token ids out; only `answer.py` knows their
text.
"""
