// The native loop's sampler by itself, for tests.
#include "sampler.h"

extern "C" unsigned long long bytes_of_sampler(int vocab) { return sampler_bytes(vocab); }

extern "C" void choose_one(
    const View* view, const float* logits, int row, int slot, int first, int n_tokens, void* scratch
) {
    sample_row(*view, logits, row, slot, first != 0, n_tokens, scratch);
}
