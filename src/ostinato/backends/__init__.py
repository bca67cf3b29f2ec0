"""Backends, one folder each, complete in itself: limits, weight layout, plan, starts, prompt chunks, sources."""
