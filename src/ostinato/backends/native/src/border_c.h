// The border for Python, by itself: what tests call. The loop calls run_border.
#pragma once
#include "border.h"

extern "C" int ostinato_border(const View* view, unsigned long long plan_hash, unsigned long long epoch, long long now) {
    return run_border(*view, plan_hash, epoch, now);
}
