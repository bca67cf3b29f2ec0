// Shared by the stand-alone programs: one set of names for CUDA and HIP, options, and checks.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define GPU(name) hip##name
#define GPU_CORES hipDeviceAttributeMultiprocessorCount
#define GPU_COOPERATIVE hipDeviceAttributeCooperativeLaunch
#define GPU_MAPPED hipHostMallocMapped
#define gpu_host_malloc hipHostMalloc
#else
#include <cuda_runtime.h>
#define GPU(name) cuda##name
#define GPU_CORES cudaDevAttrMultiProcessorCount
#define GPU_COOPERATIVE cudaDevAttrCooperativeLaunch
#define GPU_MAPPED cudaHostAllocMapped
#define gpu_host_malloc cudaHostAlloc
#endif

#include "kernels.h"

#define CHECK(call)                                                                                                   \
    do {                                                                                                              \
        GPU(Error_t) error = (call);                                                                                  \
        if (error != GPU(Success)) {                                                                                  \
            fprintf(stderr, "%s failed: %s\n", #call, GPU(GetErrorString)(error));                                    \
            exit(2);                                                                                                  \
        }                                                                                                             \
    } while (0)

const double DEADLINE_S = 30;

struct Options {
    long long n = 1 << 20;
    int steps = 500, blocks = 0, threads = 512, body = BODY_AXPY;
    float a = 0.001f;
    int cores = 0;

    [[noreturn]] static void refuse(const std::string& why) {
        fprintf(stderr, "%s\noptions: --n N --steps N --blocks N (0: one per multiprocessor) --threads N --a X --body axpy|tail\n", why.c_str());
        exit(2);
    }

    // "--n=5" and "--n 5".
    static Options of(int argc, char** argv) {
        Options o;
        for (int i = 1; i < argc; ++i) {
            std::string word = argv[i], value;
            const size_t equals = word.find('=');
            if (equals != std::string::npos) value = word.substr(equals + 1), word = word.substr(0, equals);
            else if (i + 1 < argc) value = argv[++i];
            char* rest = nullptr;
            const double number = strtod(value.c_str(), &rest);
            const bool plain = !value.empty() && *rest == 0;
            if (word == "--body" && (value == "axpy" || value == "tail")) o.body = value == "tail";
            else if (!plain) refuse(word + " " + value + ": not understood");
            else if (word == "--n" && number >= 1 && number <= (1ll << 31)) o.n = (long long)number;
            else if (word == "--steps" && number >= 1 && number <= 1000000) o.steps = (int)number;
            else if (word == "--blocks" && number >= 0 && number <= 1000000) o.blocks = (int)number;
            else if (word == "--threads" && number >= 32 && number <= 1024) o.threads = (int)number;
            else if (word == "--a" && std::fabs(number) <= 1) o.a = (float)number;
            else refuse(word + " " + value + ": out of range, or no option");
        }
        int device = 0;
        CHECK(GPU(GetDevice)(&device));
        CHECK(GPU(DeviceGetAttribute)(&o.cores, GPU_CORES, device));
        if (o.blocks == 0) o.blocks = o.cores;
        return o;
    }
};

// Fresh data for one vector of hidden state per request, and the expected result in float64.
struct Bench {
    const Options& o;
    int requests;
    std::vector<float> x, start, found;
    double largest = 0.5;  // that was expected, at the last check
    float *dx = nullptr, *dh = nullptr;
    GPU(Stream_t) stream;
    GPU(Event_t) began, ended;

    Bench(const Options& options, int n_requests) : o(options), requests(n_requests), x(o.n), start(o.n * n_requests), found(start.size()) {
        std::mt19937 random{std::random_device{}()};
        // Small, so that no sum of 500 rounded steps can be off by 1e-5: each is off by 2^-26 at most while |h| < 0.5.
        std::uniform_real_distribution<float> unit(-0.25f, 0.25f);
        for (float& v : x) v = unit(random);
        for (float& v : start) v = unit(random);
        CHECK(GPU(Malloc)((void**)&dx, x.size() * sizeof(float)));
        CHECK(GPU(Malloc)((void**)&dh, start.size() * sizeof(float)));
        CHECK(GPU(Memcpy)(dx, x.data(), x.size() * sizeof(float), GPU(MemcpyHostToDevice)));
        CHECK(GPU(StreamCreate)(&stream));
        CHECK(GPU(EventCreate)(&began));
        CHECK(GPU(EventCreate)(&ended));
    }

    void reset() {
        CHECK(GPU(Memset)(dh, 0xff, start.size() * sizeof(float)));  // NaN, so that a missing copy shows
        CHECK(GPU(Memcpy)(dh, start.data(), start.size() * sizeof(float), GPU(MemcpyHostToDevice)));
        CHECK(GPU(DeviceSynchronize)());
    }

    template <typename Work> float ms_of(Work work) {
        CHECK(GPU(EventRecord)(began, stream));
        work();
        CHECK(GPU(EventRecord)(ended, stream));
        const auto since = std::chrono::steady_clock::now();
        while (GPU(EventQuery)(ended) != GPU(Success)) {
            CHECK(GPU(GetLastError)() == GPU(ErrorNotReady) ? GPU(Success) : GPU(PeekAtLastError)());
            if (std::chrono::steady_clock::now() - since > std::chrono::duration<double>(2 * DEADLINE_S)) {
                fprintf(stderr, "the device did not end within %.0f s\n", 2 * DEADLINE_S);
                exit(2);
            }
        }
        float ms = 0;
        CHECK(GPU(EventElapsedTime)(&ms, began, ended));
        return ms;
    }

    // The largest difference from the float64 twin after these steps of each request, `sum` of their factors for AXPY.
    double error(const std::vector<std::vector<float>>& factors) {
        CHECK(GPU(Memcpy)(found.data(), dh, found.size() * sizeof(float), GPU(MemcpyDeviceToHost)));
        double worst = 0;
        largest = 0.5;
        for (int r = 0; r < requests; ++r) {
            double sum = 0;
            for (float a : factors[r]) sum += a;
            for (long long i = 0; i < o.n; ++i) {
                double h = start[r * o.n + i];
                if (o.body == BODY_AXPY) h += sum * x[i];
                else
                    for (float a : factors[r]) h += a * 0.5 * (h + x[i]) * (1 + std::erf((h + x[i]) * 0.70710678118654752));
                largest = std::fmax(largest, std::fabs(h));
                const double off = std::fabs(h - found[r * o.n + i]);
                if (!(off <= worst)) worst = off;  // a NaN is the worst
            }
        }
        return worst;
    }

    void* short_kernel() const { return o.body == BODY_AXPY ? (void*)short_axpy : (void*)short_tail; }

    void launch_short(float a) {
        void* given[] = {&dx, &dh, (void*)&o.n, &a};
        CHECK(GPU(LaunchKernel)(short_kernel(), dim3(o.blocks), dim3(o.threads), given, 0, stream));
    }

    double bar() const { return 1e-5 * std::fmax(1.0, o.steps / 500.0) * largest / 0.5; }

    // Print one line; false where the result is wrong.
    bool tell(const char* name, float ms, float baseline_ms, double err) const {
        printf("%-22s %9.3f ms  %10.0f tokens/s  speed-up %5.2f  max_abs_err=%.3e%s\n", name, ms, o.steps / (ms / 1e3), baseline_ms / ms, err,
               err < bar() ? "" : "  WRONG");
        return err < bar();
    }
};
