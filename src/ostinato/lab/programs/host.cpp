// The host's part of the laboratory: launching in a loop, feeding a queue, and the CPU's own bodies.
//
// Native, because a loop in Python would measure Python. The driver's functions are given as pointers, so that this
// compiles without CUDA; handles are opaque.
#include <atomic>
#include <cmath>

typedef int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
typedef int (*LaunchGraph)(void*, void*);

struct NodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
    void* function;
    unsigned grid[3], block[3], shared;
    void** params;
    void** extra;
    void* kernel;
    void* context;
};
typedef int (*SetNode)(void*, void*, const NodeParams*);

extern "C" int launch_many(LaunchKernel launch, void* kernel, unsigned blocks, unsigned threads, void* stream, void** params, long long times) {
    for (long long i = 0; i < times; ++i)
        if (int error = launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, params, nullptr)) return error;
    return 0;
}

extern "C" int replay_many(LaunchGraph launch, void* graph, void* stream, long long times) {
    for (long long i = 0; i < times; ++i)
        if (int error = launch(graph, stream)) return error;
    return 0;
}

// Before each replay every node gets the factor of its step; `params[3]` points to the factor.
extern "C" int update_and_replay(
    SetNode set, LaunchGraph launch, void* graph, void** nodes, int n_nodes, void* kernel, unsigned blocks, unsigned threads, void* stream,
    void** params, const float* factors, long long times
) {
    NodeParams given{nullptr, {blocks, 1, 1}, {threads, 1, 1}, 0, params, nullptr, kernel, nullptr};
    for (long long i = 0; i < times; ++i) {
        *(float*)params[3] = factors[i];
        for (int node = 0; node < n_nodes; ++node)
            if (int error = set(graph, nodes[node], &given)) return error;
        if (int error = launch(graph, stream)) return error;
    }
    return 0;
}

struct Entry {
    int request;
    float a;
};

// Feeds a running kernel: each entry is written before it is counted.
extern "C" void feed(Entry* queue, unsigned long long* fed, int requests, const float* factors, long long times) {
    for (long long i = 0; i < times; ++i) {
        queue[i].request = (int)(i % requests);
        queue[i].a = factors[i];
        std::atomic_thread_fence(std::memory_order_release);
        *(volatile unsigned long long*)fed = i + 1;
    }
}

// The CPU's counterpart of a persistent kernel: all passes of all steps in one call.
extern "C" void run_all(const float* x, float* h, long long n, int body, const float* factors, long long steps, int kernels) {
    for (long long step = 0; step < steps; ++step)
        for (int kernel = 0; kernel < kernels; ++kernel) {
            const float a = factors[step];
            if (body == 0)
                for (long long i = 0; i < n; ++i) h[i] += a * x[i];
            else
                for (long long i = 0; i < n; ++i) {
                    const float v = h[i] + x[i];
                    h[i] += a * 0.5f * v * (1.0f + erff(v * 0.70710678f));
                }
        }
}
