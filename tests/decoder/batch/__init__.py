"""The batch room: what is refused, what is filled in, and how a batch is cut."""
