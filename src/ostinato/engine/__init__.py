"""Runs requests: admits them, feeds the loop's inbox, drains its outbox, reuses prefixes, counts.

`choose.py` says who runs a model and how, `open.py` opens it, `engine.py` is the face, `scheduler.py` the thread behind
it; `work.py` is what is asked beside answers, `texts.py` and `saved.py` who ask it. Token ids in, token ids out; only
`answer.py` knows their text.
"""
