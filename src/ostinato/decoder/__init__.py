"""Tokens through the model: prompts, scoring, embeddings and single steps all run through `flow.py`."""
