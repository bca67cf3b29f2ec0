// The step boundary as CUDA would run it, without CUDA: lanes take turns from SYNC to SYNC, in an order of the test's
// choice.
//
// A missing SYNC makes the outcome depend on the order of the lanes, which the test varies; a SYNC that some lanes do
// not reach, which would hang a GPU, is counted.
#include <ucontext.h>
#include <vector>

#define LANES 8
static ucontext_t turns[LANES], outside;
static int lane, n_syncs[LANES];

static void yield() {
    ++n_syncs[lane];
    swapcontext(&turns[lane], &outside);
}

#define THREAD lane
#define N_THREADS LANES
#define SYNC() yield()
#define SHARED static
#define BOUNDARY_FN static inline
#define BOUNDARY_TABLE static const
#define UNROLLED
#define NAP()
#include "step_boundary.h"

static struct {
    View view;
    unsigned long long plan_hash, epoch;
    long long now;
} given;
static int go[LANES];
static bool done[LANES];

static void play() {
    go[lane] = run_boundary(given.view, given.plan_hash, given.epoch, given.now);
    done[lane] = true;
}

// What run_boundary gives, or -1 when the lanes did not agree on it or on the number of SYNCs.
extern "C" int boundary_in_lanes(
    char* table, char* admissions, char* rings, int* grammars, unsigned long long plan_hash, unsigned long long epoch,
    long long now, unsigned seed
) {
    static unsigned order;  // not on the stack, which a switch of contexts could bring back as it was
    order = seed;
    static std::vector<std::vector<char>> stacks(LANES, std::vector<char>(1 << 16));
    given = {{table, admissions, rings, grammars}, plan_hash, epoch, now};
    for (lane = 0; lane < LANES; ++lane) {
        n_syncs[lane] = 0;
        done[lane] = false;
        getcontext(&turns[lane]);
        turns[lane].uc_stack.ss_sp = stacks[lane].data();
        turns[lane].uc_stack.ss_size = stacks[lane].size();
        turns[lane].uc_link = &outside;
        makecontext(&turns[lane], play, 0);
    }
    for (int n_done = 0; n_done < LANES;) {
        int line[LANES];
        for (int i = 0; i < LANES; ++i) line[i] = i;
        for (int i = LANES - 1; i > 0; --i) {
            order = order * 1664525u + 1013904223u;
            const int other = (order >> 8) % (i + 1), kept = line[i];
            line[i] = line[other];
            line[other] = kept;
        }
        for (int i = 0; i < LANES; ++i) {
            lane = line[i];
            if (done[lane]) continue;
            swapcontext(&outside, &turns[lane]);
            n_done += done[lane];
        }
    }
    for (int i = 1; i < LANES; ++i) {
        if (go[i] != go[0] || n_syncs[i] != n_syncs[0]) return -1;
    }
    return go[0];
}
