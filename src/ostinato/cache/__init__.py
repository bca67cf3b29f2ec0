"""The KV cache as integers and bytes: pages, prefixes, reservations, windows, saved sequences."""
