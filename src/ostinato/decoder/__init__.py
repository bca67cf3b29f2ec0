"""Tokens through the model: chunks of single sequences through `flow.py`, any batch through `cells/decoder.py`."""
