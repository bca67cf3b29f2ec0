"""The decode loop: its device state and rings (`layout.py`), what a step is (`plan.py`), who may touch it (`mode.py`),
and the ways to run it (`starts/`). Tokens are integers here: no strings, no HTTP. docs/ring.md tells the protocol."""
