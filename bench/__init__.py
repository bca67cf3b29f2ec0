"""Measurements that CI does not run; each ends by printing its note as one JSON line."""
