// The last node of a WHILE graph's body: counts down, and sets whether the body runs again. CUDA only.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#else
extern "C" __device__ __cudart_builtin__ void CUDARTAPI
cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);
#endif

extern "C" __global__ void count_down(long long* left, cudaGraphConditionalHandle again) {
    *left -= 1;
    cudaGraphSetConditional(again, *left > 0);
}
