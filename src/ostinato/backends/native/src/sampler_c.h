// The sampler for Python, by itself: what tests call. The loop calls choose.
#pragma once
#include "sampler.h"

extern "C" unsigned long long ostinato_sampler_bytes(int vocab) { return sampler_bytes(vocab); }

extern "C" void ostinato_sample(
    const View* view, const float* logits, int row, int slot, int first, int n_tokens, void* scratch
) {
    sample_row(*view, logits, row, slot, first != 0, n_tokens, scratch);
}
