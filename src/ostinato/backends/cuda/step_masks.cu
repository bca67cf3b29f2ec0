// The masks of rows under grammars on CUDA: a node of every step, before sampling. See loop/step_masks.h.
#include "step_masks.h"

extern "C" __global__ void __launch_bounds__(256)
step_masks(char* table, char* admissions, char* rings, int* grammars) {
    __shared__ MaskWork work;
    const View view{table, admissions, rings, grammars};
    if (!*TABLE_finds_masks(view)) return;
    find_masks(view, (int)blockIdx.x, (int)gridDim.x, work, [](int) {});
}
