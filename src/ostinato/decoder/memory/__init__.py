"""Where keys and values live: the tensors (`store.py`) and which cells a forward sees (`kv_cache.py`)."""
