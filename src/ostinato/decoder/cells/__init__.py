"""The cell memory kind: any batch of tokens of any sequences, in plain torch."""
