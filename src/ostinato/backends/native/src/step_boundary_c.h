// The step boundary for Python, by itself: what tests call. The loop calls run_boundary.
#pragma once
#include "step_boundary.h"

extern "C" int ostinato_boundary(const View* view, unsigned long long plan_hash, unsigned long long epoch, long long now) {
    return run_boundary(*view, plan_hash, epoch, now);
}
