"""One op per file: the checked function and its twin in plain torch, which is the definition.

`table.py` is the one place that says which function serves which device; models take their ops from there.
Kernels know shapes and dtypes and nothing of requests or families.
"""
