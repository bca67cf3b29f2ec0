"""The caller's batch (`batch.py`), its checks (`sanitizer.py`), and its split into ubatches (`splitter.py`).

Numpy and integers only: no tensors, no models, and of memory only the first and last position of a sequence.
"""
