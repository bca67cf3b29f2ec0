"""Runs requests: gives them slots and pages, feeds the loop's inbox, drains its outbox, reuses prefixes, counts.

`choose.py` chooses the backend and the mode, `open.py` opens them, `engine.py` is the public interface, and
`scheduler.py` the thread behind it. `work.py` holds work other than answers; `texts.py` and `saved.py` submit it.
Token ids in, token ids out; only `answer.py` knows their text.
"""
