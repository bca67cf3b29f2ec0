"""The CUDA backend: Triton kernels, and `eager`, `graph` and `loop` over them."""
