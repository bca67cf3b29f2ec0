"""Model files: reading GGUF and safetensors, dequantising blocks, and the store of fetched models.

Bytes in, numbers and plain Python out; nothing here knows what a model computes or where it runs. Start
reading at `checkpoint.py`, which says what every kind of file offers.
"""
