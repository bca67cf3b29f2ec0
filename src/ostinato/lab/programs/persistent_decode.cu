// Measures what a persistent kernel saves. A loop of short kernels; one kernel that takes all its steps from a queue on
// the device; and the same kernel, fed by the host while it runs, for several requests.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -lineinfo persistent_decode.cu -o persistent_decode
//   hipcc -O3 -std=c++17 -x hip --offload-arch=gfx90a persistent_decode.cu -o persistent_decode
#include "gpu.h"

#include <atomic>

const int REQUESTS = 4;

struct Persistent {
    Bench& bench;
    Entry* queue = nullptr;                                   // the device's own
    Entry *fed_queue = nullptr, *fed_queue_here = nullptr;    // mapped: the host writes, the device reads
    unsigned long long *fed = nullptr, *fed_here = nullptr;
    Control* control = nullptr;

    explicit Persistent(Bench& b) : bench(b) {
        CHECK(GPU(Malloc)((void**)&queue, b.o.steps * sizeof(Entry)));
        CHECK(gpu_host_malloc((void**)&fed_queue_here, b.o.steps * sizeof(Entry), GPU_MAPPED));
        CHECK(gpu_host_malloc((void**)&fed_here, sizeof(unsigned long long), GPU_MAPPED));
        CHECK(GPU(HostGetDevicePointer)((void**)&fed_queue, fed_queue_here, 0));
        CHECK(GPU(HostGetDevicePointer)((void**)&fed, fed_here, 0));
        CHECK(GPU(Malloc)((void**)&control, sizeof(Control)));
        int device = 0, can = 0, resident = 0;
        CHECK(GPU(GetDevice)(&device));
        CHECK(GPU(DeviceGetAttribute)(&can, GPU_COOPERATIVE, device));
        if (!can) Options::refuse("this GPU has no cooperative launch, which a barrier over the grid needs");
        CHECK(GPU(OccupancyMaxActiveBlocksPerMultiprocessor)(&resident, (const void*)persistent, b.o.threads, 0));
        if (b.o.blocks > resident * b.o.cores)
            Options::refuse("--blocks " + std::to_string(b.o.blocks) + ": with " + std::to_string(b.o.threads) + " threads at most " +
                            std::to_string(resident * b.o.cores) + " blocks are resident at once here, and a barrier waits for all of them");
    }

    void launch(const Entry* entries, const unsigned long long* counts) {
        const Options& o = bench.o;
        long long total = o.steps;
        int kernels = 1, does = PASSES | BARRIERS, body = o.body;
        unsigned long long deadline = (unsigned long long)(DEADLINE_S * TICKS_PER_S);
        CHECK(GPU(MemsetAsync)(control, 0, sizeof(Control), bench.stream));
        void* given[] = {&bench.dx, &bench.dh, (void*)&o.n, &queue, &total, &kernels, &body, &entries, &counts, &control, &deadline, &does};
        CHECK(GPU(LaunchCooperativeKernel)((const void*)persistent, dim3(o.blocks), dim3(o.threads), given, 0, bench.stream));
    }

    void check_fault() {
        Control seen;
        CHECK(GPU(Memcpy)(&seen, control, sizeof seen, GPU(MemcpyDeviceToHost)));
        if (seen.fault) {
            fprintf(stderr, "a wait on the device passed its deadline of %.0f s; nothing below is true\n", DEADLINE_S);
            exit(1);
        }
    }
};

int main(int argc, char** argv) {
    const Options o = Options::of(argc, argv);
    Bench bench(o, REQUESTS);
    Persistent kernel(bench);
    printf("n=%lld steps=%d blocks=%d threads=%d body=%s\n", o.n, o.steps, o.blocks, o.threads, o.body == BODY_AXPY ? "axpy" : "tail");

    std::vector<std::vector<float>> one(REQUESTS), several(REQUESTS);
    one[0].assign(o.steps, o.a);
    bench.launch_short(o.a);
    bench.reset();
    const float baseline = bench.ms_of([&] { for (int s = 0; s < o.steps; ++s) bench.launch_short(o.a); });
    bool right = bench.tell("baseline loop", baseline, baseline, bench.error(one));

    std::vector<Entry> entries(o.steps, Entry{0, o.a});
    CHECK(GPU(Memcpy)(kernel.queue, entries.data(), entries.size() * sizeof(Entry), GPU(MemcpyHostToDevice)));
    float ms = 0;
    for (int round = 0; round < 2; ++round) {  // the first loads the kernel
        bench.reset();
        ms = bench.ms_of([&] { kernel.launch(nullptr, nullptr); });
        kernel.check_fault();
    }
    right &= bench.tell("persistent", ms, baseline, bench.error(one));

    bench.reset();
    CHECK(GPU(Memset)(kernel.queue, 0xff, entries.size() * sizeof(Entry)));  // so that entries of the run before cannot be used again
    *(volatile unsigned long long*)kernel.fed_here = 0;
    ms = bench.ms_of([&] {
        kernel.launch(kernel.fed_queue, kernel.fed);
        for (int s = 0; s < o.steps; ++s) {  // while it runs
            kernel.fed_queue_here[s] = Entry{s % REQUESTS, o.a * (s % REQUESTS + 1)};
            several[s % REQUESTS].push_back(kernel.fed_queue_here[s].a);
            std::atomic_thread_fence(std::memory_order_release);
            *(volatile unsigned long long*)kernel.fed_here = s + 1;
        }
    });
    kernel.check_fault();
    right &= bench.tell("persistent, fed", ms, baseline, bench.error(several));
    return right ? 0 : 1;
}
