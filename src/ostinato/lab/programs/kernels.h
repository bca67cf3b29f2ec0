// What the laboratory runs on a GPU: two bodies, each as a short kernel and inside a kernel that stays.
//
// CUDA and HIP, compiled at run time or with the stand-alone programs. A body is one pass over a vector that stands for a
// token's hidden state: AXPY (h += a x) or the tail of a decode step (h += a gelu(h + x): bias, GELU, residual). Every
// kernel computes every element of every pass, whatever the grid.
#pragma once

#define BODY_AXPY 0
#define BODY_TAIL 1

#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
// A constant clock of 100 MHz on gfx9.
#define TICKS_PER_S 100000000ull
__device__ inline unsigned long long ticks() { return __builtin_amdgcn_s_memrealtime(); }
#else
#define TICKS_PER_S 1000000000ull
__device__ inline unsigned long long ticks() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#endif

__device__ inline float passed(int body, float h, float x, float a) {
    if (body == BODY_AXPY) return fmaf(a, x, h);
    const float v = h + x;
    return fmaf(a, 0.5f * v * (1.0f + erff(v * 0.70710678118654752f)), h);
}

// What another block may have written, past this multiprocessor's own cache.
__device__ inline float fresh(const float* at) {
#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    return __ldcg(at);
#endif
}

// One pass over [0, n) by the whole grid. Slices move on by `turn` blocks from pass to pass: an element's next value is
// made by another block, so that a barrier that does not hold shows as a wrong result. Several elements are on their way
// at once: one after the other, a pass would be as long as its loads are slow.
__device__ inline void pass_over(const float* x, float* h, long long n, float a, int body, unsigned turn) {
    const int AT_ONCE = 8;
    const long long width = (long long)gridDim.x * blockDim.x;
    const unsigned block = (blockIdx.x + turn) % gridDim.x;
    for (long long from = (long long)block * blockDim.x + threadIdx.x; from < n; from += AT_ONCE * width) {
        float before[AT_ONCE], given[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const long long i = from + k * width;
            if (i < n) before[k] = fresh(h + i), given[k] = x[i];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const long long i = from + k * width;
            if (i < n) h[i] = passed(body, before[k], given[k], a);
        }
    }
}

// --- short kernels: one pass each ---

extern "C" __global__ void short_axpy(const float* x, float* h, long long n, float a) {
    pass_over(x, h, n, a, BODY_AXPY, 0);
}

extern "C" __global__ void short_tail(const float* x, float* h, long long n, float a) {
    pass_over(x, h, n, a, BODY_TAIL, 0);
}

// Takes so many ticks and does nothing: a body of known length.
extern "C" __global__ void hold(unsigned long long length) {
    const unsigned long long end = ticks() + length;
    while (ticks() < end) {}
}

// --- the kernel that stays ---

struct Entry {      // one token step of one request
    int request;    // whose state it is
    float a;
};

struct Control {                     // zeroed before each launch
    unsigned long long arrived;      // at barriers, all blocks together
    unsigned long long published;    // entries that blocks may take: the device's copy of `fed`
    unsigned long long fault;        // not 0: a wait passed its deadline, and everybody leaves
};

__device__ inline unsigned long long peek(const unsigned long long* word) {
    return *(const volatile unsigned long long*)word;
}

// Until *word >= wanted; false when the deadline has passed, here or anywhere.
__device__ inline bool wait_for(const unsigned long long* word, unsigned long long wanted, Control* control, unsigned long long end) {
    while (peek(word) < wanted) {
        if (peek(&control->fault)) return false;
        if (ticks() > end) {
            atomicExch(&control->fault, 1ull);
            return false;
        }
    }
    return true;
}

// All blocks of the grid, which must all be resident: a cooperative launch sees to that.
__device__ inline bool grid_barrier(Control* control, unsigned long long& round, unsigned long long end) {
    __shared__ bool held;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what this block wrote, before it says so
        atomicAdd(&control->arrived, 1ull);
        held = wait_for(&control->arrived, ++round * gridDim.x, control, end);
        __threadfence();  // and what others wrote, after they said so
    }
    __syncthreads();
    return held;
}

// Plays `total` entries of the queue, each of `kernels` passes with a barrier after every one. `fed` is null where the
// queue is full from the start; else it is a word that the host counts up while this runs, and block 0 passes it on.
// `barriers` 0: without them, to see what they cost (states are wrong then, unless there is one block).
extern "C" __global__ void persistent(
    const float* x, float* h, long long n, const Entry* queue, long long total, int kernels, int body,
    const unsigned long long* fed, Control* control, unsigned long long deadline, int barriers
) {
    __shared__ bool there;
    const unsigned long long end = ticks() + deadline;
    unsigned long long round = 0;
    unsigned turn = 0;
    for (long long step = 0; step < total; ++step) {
        if (fed) {
            if (threadIdx.x == 0) {
                if (blockIdx.x == 0) {
                    there = wait_for(fed, step + 1, control, end);
                    __threadfence_system();  // the entry was written before the count
                    if (there) atomicExch(&control->published, peek(fed));
                } else {
                    there = wait_for(&control->published, step + 1, control, end);
                }
                __threadfence();
            }
            __syncthreads();
            if (!there) return;
        }
        const volatile Entry* entry = queue + step;
        const float a = entry->a;
        float* state = h + (long long)entry->request * n;
        for (int kernel = 0; kernel < kernels; ++kernel) {
            pass_over(x, state, n, a, body, barriers ? turn++ : 0);
            if (barriers && !grid_barrier(control, round, end)) return;
        }
    }
}
