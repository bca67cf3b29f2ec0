"""Tokens through a model without memory: everything attends to everything, in one ubatch (EN rules)."""
