"""The kernels of the CUDA step, in Triton, each with its twin in torch one folder up.

Imported only where a GPU plan is built: a machine without Triton does without them.
"""
