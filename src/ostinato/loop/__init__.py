"""The decode loop: its device state and rings (`layout.py`), what a step is (`plan.py`), the rules of decode mode
(`mode.py`), and the interface of the ways to run it (`start.py`). Tokens are integers here: no strings, no HTTP.
docs/ring.md describes the protocol."""
