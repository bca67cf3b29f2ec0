// The kernels of the laboratory on a GPU: two bodies, each as a short kernel and inside a persistent kernel.
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

// Loads a value that another block may have written: it bypasses this multiprocessor's own cache.
__device__ inline float fresh(const float* at) {
#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    return __ldcg(at);
#endif
}

// One pass over [0, n) by the whole grid. Slices move on by `turn` blocks: another block then computes an element's next
// value, so that a barrier that does not hold gives a wrong result. Each thread has several loads in flight, because
// a pass with one at a time would be bound by their latency.
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

// Waits for so many ticks: a body of known length.
extern "C" __global__ void hold(unsigned long long length) {
    const unsigned long long end = ticks() + length;
    while (ticks() < end) {}
}

// --- the persistent kernel ---

struct Entry {      // one token step of one request
    int request;    // whose state it is
    float a;
};

struct Control {                     // zeroed before each launch; each word in a line of its own
    unsigned long long arrived;      // at barriers, all blocks together
    unsigned long long pad1[15];
    unsigned long long published;    // entries that blocks may take
    unsigned long long pad2[15];
    unsigned long long fault;        // not 0: a wait passed its deadline, and every block leaves
    unsigned long long pad3[15];
};

// Loads a word that other blocks or (`hosts`) the host write, with acquire order.
__device__ inline unsigned long long acquired(const unsigned long long* word, bool hosts = false) {
#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
    return hosts ? __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM)
                 : __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
#else
    unsigned long long value;
    if (hosts) asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    else asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#endif
}

__device__ inline void release(unsigned long long* word, unsigned long long value) {
#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
    __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
#else
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
}

// Adds 1, with release order.
__device__ inline void count(unsigned long long* word) {
#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
    __hip_atomic_fetch_add(word, 1ull, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
#else
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(word) : "memory");
#endif
}

// Waits until *word >= wanted; false when the deadline has passed in any block. Clock and fault are read rarely, because
// reading them takes longer than a usual wait.
__device__ inline bool wait_for(
    const unsigned long long* word, unsigned long long wanted, Control* control, unsigned long long end, bool hosts = false
) {
    for (unsigned polls = 1; acquired(word, hosts) < wanted; ++polls) {
        if (polls % 4096) continue;
        if (acquired(&control->fault)) return false;
        if (ticks() > end) {
            release(&control->fault, 1);
            return false;
        }
    }
    return true;
}

// A barrier over all blocks of the grid. All must be resident, which a cooperative launch ensures.
__device__ inline bool grid_barrier(Control* control, unsigned long long& round, unsigned long long end) {
    __shared__ bool held;
    __syncthreads();
    ++round;
    if (threadIdx.x == 0) {
        count(&control->arrived);
        held = wait_for(&control->arrived, round * gridDim.x, control, end);
    }
    __syncthreads();
    return held;
}

// The next entry of the queue, in every thread of every block; false past a deadline. If the host feeds the queue,
// block 0 alone reads the host's memory and copies the entries that were published since its last look.
__device__ inline bool next_entry(
    Entry& entry, Entry* queue, long long step, const Entry* fed_queue, const unsigned long long* fed,
    unsigned long long& known, Control* control, unsigned long long end
) {
    __shared__ bool there;
    __shared__ Entry taken;
    if (threadIdx.x == 0) {
        there = true;
        if (fed && known <= (unsigned long long)step) {
            if (blockIdx.x == 0) {
                there = wait_for(fed, step + 1, control, end, true);
                const unsigned long long upto = acquired(fed, true);
                for (; there && known < upto; ++known) queue[known] = fed_queue[known];
                release(&control->published, known);
            } else {
                there = wait_for(&control->published, step + 1, control, end);
                known = acquired(&control->published);
            }
        }
        if (there) taken = queue[step];
    }
    __syncthreads();
    entry = taken;
    return there;
}

#define PASSES 1    // the parts of the persistent kernel: passes, barriers after them, or both
#define BARRIERS 2
const int PASSES_A_TURN = 16;  // passes with the same slices, so that a block can use its cache

// Runs `total` entries of the queue, each of `kernels` passes with a barrier after every one. `fed` is null if the
// queue is full from the start; else it counts the entries that the host has written to `fed_queue` so far.
// `does`: PASSES, BARRIERS or both; one alone shows its cost.
extern "C" __global__ void persistent(
    const float* x, float* h, long long n, Entry* queue, long long total, int kernels, int body,
    const Entry* fed_queue, const unsigned long long* fed, Control* control, unsigned long long deadline, int does
) {
    const unsigned long long end = ticks() + deadline;
    unsigned long long round = 0, known = 0;
    Entry entry = fed ? Entry{} : queue[0];
    for (long long step = 0; step < total; ++step) {
        if (fed && !next_entry(entry, queue, step, fed_queue, fed, known, control, end)) return;
        float* state = h + (long long)entry.request * n;
        const float a = entry.a;
        // Loaded while this step runs.
        if (!fed && step + 1 < total) entry = queue[step + 1];
        for (int kernel = 0; kernel < kernels; ++kernel) {
            if (does & PASSES) pass_over(x, state, n, a, body, does & BARRIERS ? (unsigned)(round / PASSES_A_TURN) : 0);
            if (does & BARRIERS && !grid_barrier(control, round, end)) return;
        }
    }
}
