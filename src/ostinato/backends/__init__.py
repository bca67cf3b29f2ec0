"""Who computes: one folder a backend, each whole: limits, weight layout, plan, starts, prompt chunks, sources."""
