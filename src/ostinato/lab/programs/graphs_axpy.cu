// Measures what execution graphs save. A loop of short kernels, launched one by one; the same as one graph; as a graph of
// one step whose factor is set before each replay; and, on CUDA, as a WHILE graph, which repeats itself.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -lineinfo graphs_axpy.cu -o graphs_axpy
//   hipcc -O3 -std=c++17 -x hip --offload-arch=gfx90a graphs_axpy.cu -o graphs_axpy
#include "gpu.h"
#if !defined(__HIPCC__) && CUDART_VERSION >= 12040
#define HAS_WHILE
#include "while_condition.h"
#endif

struct Graph {
    GPU(Graph_t) graph = nullptr;
    GPU(GraphExec_t) exec = nullptr;

    void instantiate() { CHECK(GPU(GraphInstantiateWithFlags)(&exec, graph, 0)); }
    ~Graph() {
        if (exec) CHECK(GPU(GraphExecDestroy)(exec));
        if (graph) CHECK(GPU(GraphDestroy)(graph));
    }
};

static void capture(Bench& bench, Graph& into, int passes) {
    CHECK(GPU(StreamBeginCapture)(bench.stream, GPU(StreamCaptureModeThreadLocal)));
    for (int i = 0; i < passes; ++i) bench.launch_short(bench.o.a);
    CHECK(GPU(StreamEndCapture)(bench.stream, &into.graph));
    into.instantiate();
}

int main(int argc, char** argv) {
    const Options o = Options::of(argc, argv);
    Bench bench(o, 1);
    const std::vector<std::vector<float>> same{std::vector<float>(o.steps, o.a)};
    printf("n=%lld steps=%d blocks=%d threads=%d body=%s\n", o.n, o.steps, o.blocks, o.threads, o.body == BODY_AXPY ? "axpy" : "tail");

    bench.launch_short(o.a);  // loads the kernel
    bench.reset();
    const float baseline = bench.ms_of([&] { for (int s = 0; s < o.steps; ++s) bench.launch_short(o.a); });
    bool right = bench.tell("baseline loop", baseline, baseline, bench.error(same));

    Graph whole;
    capture(bench, whole, o.steps);
    CHECK(GPU(GraphLaunch)(whole.exec, bench.stream));  // the first launch uploads
    CHECK(GPU(DeviceSynchronize)());
    bench.reset();
    float ms = bench.ms_of([&] { CHECK(GPU(GraphLaunch)(whole.exec, bench.stream)); });
    right &= bench.tell("graph of all steps", ms, baseline, bench.error(same));

    Graph step;
    capture(bench, step, 1);
    size_t n_nodes = 1;
    GPU(GraphNode_t) node;
    CHECK(GPU(GraphGetNodes)(step.graph, &node, &n_nodes));
    GPU(KernelNodeParams) given{};
    CHECK(GPU(GraphKernelNodeGetParams)(node, &given));
    std::vector<std::vector<float>> varied{{}};
    for (int s = 0; s < o.steps; ++s) varied[0].push_back(o.a * (s % 2 ? 0.5f : 1.5f));
    bench.reset();
    ms = bench.ms_of([&] {
        for (float a : varied[0]) {
            void* words[] = {&bench.dx, &bench.dh, (void*)&o.n, &a};
            given.kernelParams = words;
            CHECK(GPU(GraphExecKernelNodeSetParams)(step.exec, node, &given));
            CHECK(GPU(GraphLaunch)(step.exec, bench.stream));
        }
    });
    right &= bench.tell("graph, a set each step", ms, baseline, bench.error(varied));

#if defined(HAS_WHILE)
    Graph loop;
    long long *left = nullptr, steps = o.steps;
    CHECK(cudaMalloc((void**)&left, sizeof(long long)));
    CHECK(cudaGraphCreate(&loop.graph, 0));
    cudaGraphConditionalHandle again;
    CHECK(cudaGraphConditionalHandleCreate(&again, loop.graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNodeParams turning{};
    turning.type = cudaGraphNodeTypeConditional;
    turning.conditional.handle = again;
    turning.conditional.type = cudaGraphCondTypeWhile;
    turning.conditional.size = 1;
    cudaGraphNode_t while_node;
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphAddNode(&while_node, loop.graph, nullptr, nullptr, 0, &turning));
#else
    CHECK(cudaGraphAddNode(&while_node, loop.graph, nullptr, 0, &turning));
#endif
    CHECK(cudaStreamBeginCaptureToGraph(bench.stream, turning.conditional.phGraph_out[0], nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
    bench.launch_short(o.a);
    count_down<<<1, 1, 0, bench.stream>>>(left, again);
    CHECK(cudaStreamEndCapture(bench.stream, nullptr));
    loop.instantiate();
    for (int round = 0; round < 2; ++round) {  // the first launch uploads
        bench.reset();
        CHECK(cudaMemcpy(left, &steps, sizeof steps, cudaMemcpyHostToDevice));
        ms = bench.ms_of([&] { CHECK(cudaGraphLaunch(loop.exec, bench.stream)); });
    }
    right &= bench.tell("WHILE graph", ms, baseline, bench.error(same));
#endif
    return right ? 0 : 1;
}
