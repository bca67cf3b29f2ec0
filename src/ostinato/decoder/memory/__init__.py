"""Memory of sequences: tensors of keys and values (`store.py`) and the cells that a forward sees (`kv_cache.py`)."""
