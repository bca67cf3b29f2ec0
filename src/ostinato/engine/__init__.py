"""Runs requests: places the model on a device (`placement.py`), turns prompts into tokens of output (`engine.py`).

Token ids in, token ids out; text and HTTP are other rooms.
"""
