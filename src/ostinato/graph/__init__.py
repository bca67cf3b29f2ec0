"""Which built thing runs a ubatch: reserved for the worst case once, built per shape, reused while the shape stays."""
