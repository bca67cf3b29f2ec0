// The step boundary on CUDA: one block of 128 threads, the last node of every step. See step_boundary.h.
#include "step_boundary.h"

// NVRTC knows the type but not the function, which is the device runtime's and built in.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI
cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

// For the modes in which the host paces the steps: it reads GO.
extern "C" __global__ void __launch_bounds__(128)
step_boundary(
    char* table, char* admissions, char* rings, int* grammars, unsigned long long plan_hash, unsigned long long epoch
) {
    run_boundary(View{table, admissions, rings, grammars}, plan_hash, epoch, now_ns());
}

// For the WHILE graph: the body runs again while the condition is set.
extern "C" __global__ void __launch_bounds__(128)
boundary_loop(
    char* table, char* admissions, char* rings, int* grammars, unsigned long long plan_hash, unsigned long long epoch,
    cudaGraphConditionalHandle handle
) {
    int go = await_boundary(View{table, admissions, rings, grammars}, plan_hash, epoch);
    ONE cudaGraphSetConditional(handle, go);
}
