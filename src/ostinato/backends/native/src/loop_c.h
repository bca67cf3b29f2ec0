// The loop's C interface for Python: open over a plan, run, close. See backends/native/plan.py.
#pragma once
#include <new>
#include <system_error>

#include "loop.h"

extern "C" {

// How long each struct is here, so that Python can compare: Plan, Layer, Product, Mixer, Rope, Part, Outputs,
// Router.
int ostinato_plan_bytes(int which) {
    const size_t bytes[] = {sizeof(loop::Plan), sizeof(loop::Layer), sizeof(loop::Product),
                            sizeof(loop::Mixer), sizeof(loop::Rope), sizeof(loop::Part), sizeof(loop::Outputs),
                            sizeof(block::Router), sizeof(loop::Latent)};
    return int(bytes[which]);
}

// How long `scratch` of a plan must be; the plan may have none yet.
unsigned long long ostinato_scratch_bytes(const loop::Plan* plan) { return loop::scratch_bytes(*plan); }

// A loop over a plan, with its team asleep; null where the system has no memory or no threads for it. The plan's memory
// must outlive it; the struct itself is copied.
loop::Loop* ostinato_open(const loop::Plan* plan) {
    try {
        return new loop::Loop(*plan);
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error&) {
    }
    return nullptr;
}

void ostinato_close(loop::Loop* opened) { delete opened; }

// What the step boundary compares with the table's own at every step.
void ostinato_built(loop::Loop* opened, unsigned long long hash, unsigned long long epoch) {
    opened->plan.hash = hash;
    opened->plan.epoch = epoch;
}

void ostinato_run(loop::Loop* opened) { opened->run_loop(); }
void ostinato_step(loop::Loop* opened) { opened->run_one_step(); }
void ostinato_published(loop::Loop* opened) { opened->host_published(); }
void ostinato_chunk(
    loop::Loop* opened, const loop::Part* parts, int n_parts, const int* ids, const int* segments,
    const loop::Outputs* outputs
) {
    opened->run_chunk(parts, n_parts, ids, segments, outputs);
}
void ostinato_first(loop::Loop* opened, int slot) { opened->run_first(slot); }

// A row's experts by themselves, as the loop chooses them: to be compared with the twin.
void ostinato_route(
    const block::Router* router, float* scores, const float* bias, float* choice, int* chosen, float* shares
) {
    block::route(scores, bias, nullptr, *router, choice, chosen, shares);
}

// Ownership of the team, for a caller that runs several jobs between two steps of the loop.
void ostinato_acquire(loop::Loop* opened) { opened->team.acquire(); }
void ostinato_release(loop::Loop* opened) { opened->team.release(); }

}
