"""Runs requests: admits them, feeds the loop's inbox, drains its outbox, reuses prefixes, counts.

`engine.py` is the face, `scheduler.py` the thread behind it, `reserve.py` and `prefix.py` the pages, `placement.py`
where a model runs; `sequential.py` and `decoder.py` are what runs without the loop. Token ids in, token ids out; only
`answer.py` knows their text.
"""
