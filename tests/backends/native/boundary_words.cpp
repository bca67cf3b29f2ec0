// step_boundary.h with its sizes in words, as the CPU's loop has them, for tests.
#include "step_boundary.h"

extern "C" int boundary_of(const View* view, unsigned long long plan_hash, unsigned long long epoch, long long now) {
    return run_boundary(*view, plan_hash, epoch, now);
}
