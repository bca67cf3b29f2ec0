"""What the caller hands to the decoder (`batch.py`), checked (`sanitizer.py`), and cut into ubatches (`splitter.py`).

Numpy and integers only: nothing here knows tensors, models or memory beyond the first and last position it holds.
"""
