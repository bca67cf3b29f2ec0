"""Runs requests: admits them, feeds the loop's inbox, drains its outbox, reuses prefixes, counts.

`choose.py` says who runs a model and how, `open.py` opens it, `engine.py` is the face, `scheduler.py` the thread behind
it; `sequential.py` and `decoder.py` are what runs without the loop. Token ids in, token ids out; only
`answer.py` knows their text.
"""
