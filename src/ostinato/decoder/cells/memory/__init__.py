"""Memory of sequences: cells that a forward writes and sees (`kv_cache.py`), recurrent states, saved states."""
