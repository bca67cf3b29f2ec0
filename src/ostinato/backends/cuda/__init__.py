"""The CUDA backend: Triton kernels, and the modes `eager`, `graph` and `loop` over them."""
